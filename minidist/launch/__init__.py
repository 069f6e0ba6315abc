"""The parent of all ranks: `python -m minidist.launch -n 4 -m minidist.bench …`.

    arguments.py     the command line                mpiexec.py     finds it, and speaks its dialect
    job.py           one start, to its end           ranks.py       its connections to supervisors
    supervisor.py    the parent of one rank, on the rank's machine
    output.py        lines stay whole

mpiexec starts the ranks and brings them together; watching over them it leaves to the supervisors.
"""
