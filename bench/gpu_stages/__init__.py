"""The stages of gpu_check.py: each a program of its own, `python -m gpu_stages.NAME`.

A stage tells what it finds as soon as it knows it (tell.py), so that what it has told counts also
where it is ended, or ends itself, before its last line.
"""
