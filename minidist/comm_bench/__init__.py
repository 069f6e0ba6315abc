"""`python -m minidist.comm_bench`: how fast replicas sum, gather and share, and is it right?

`flags.py` says what is measured, `ways.py` has the communicators, `verbs.py` what they do with the
arrays of `buffers.py`, `data.py` the values in them. `measure.py` makes one line of the table,
`run.py` all of them, `table.py` prints and writes them. `docs/comm_bench.md` is for who uses it.
"""
