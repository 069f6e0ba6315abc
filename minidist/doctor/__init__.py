"""What there is here, who this process is, and what is missing: `python -m minidist.doctor`.

packages.py    what is installed, and what an extra would bring
machine.py     cores, memory and GPUs, and what limits them
processes.py   MPI, who has started this process, and all ranks
report.py      all of it, for people or as JSON
"""
