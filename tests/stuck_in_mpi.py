"""comm_bench whose rank 1 fails while rank 0 is in MPI's own call, which nothing interrupts."""

from __future__ import annotations

import os
import sys

from minidist.cluster import environment
from minidist.comm_bench import ways
from minidist.comm_bench.__main__ import main

enter = ways.ByMpi.enter


def fail(self):
    raise MemoryError("spam")


if environment.read(os.environ).winner.rank == 1:
    ways.ByMpi.enter = fail
sys.exit(main(["--all_reduce_spec=mpi", "--timeout=0.5", "-b=8", "-e=8"]))
