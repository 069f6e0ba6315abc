"""What there is here, who this process is, and what is missing: `python -m minidist.doctor`.

packages.py    what is installed, and what an extra would bring
machine.py     cores and memory, and what limits them
kernels.py     what computes on the CPU
gpus.py        driver, CUDA and GPUs; cuda.py asks them, in a process of its own
processes.py   MPI, who has started this process, and all ranks
report.py      all of it, for people or as JSON
"""
