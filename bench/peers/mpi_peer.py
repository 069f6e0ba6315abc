"""MPI alone: mpi4py, one process for each replica, on this machine.

    python mpi_peer.py --workload allreduce      # pip install mpi4py mpich numpy

It starts its ranks with the mpiexec that lies beside this Python, or on the PATH.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import job as jobs

ASKED = jobs.asked(
    __doc__, ("allreduce",), ("--ranks", {"action": "store_true", "help": "is a rank"})
)


def answer(variant: str, *args: Any, **more: Any) -> None:
    try:
        library = f" mpich {version('mpich')}"
    except PackageNotFoundError:
        library = ""
    jobs.answer("mpi", version("mpi4py") + library, ASKED, variant, *args, **more)


def mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def sums() -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for size, often in jobs.SUMS.items():
        buffer = np.zeros(size * 256, np.float32)
        times = np.empty(ASKED.warmup + often * ASKED.steps)
        for i in range(len(times)):
            world.Barrier()
            started = time.perf_counter()
            world.Allreduce(MPI.IN_PLACE, buffer)
            times[i] = time.perf_counter() - started
        world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        memory = world.allreduce(jobs.peak_memory())
        if world.rank == 0:
            seconds = times[ASKED.warmup :].tolist()
            answer("in place", seconds, 1024e-9 * size, "GB/s", memory=memory, batch=size)


if __name__ == "__main__":
    if ASKED.options["ranks"]:
        sums()
    else:
        command = [mpiexec(), "-n", str(ASKED.replicas), sys.executable, *sys.argv, "--ranks"]
        os.execvp(command[0], command)
