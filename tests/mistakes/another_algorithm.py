"""The ranks sum in different orders, so that their sums would differ in the last bits."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, "worker:0: .* in serial order; worker:1: .* in ring order"


def mistake(cluster):
    spec = ["copy", "xring"][cluster.task]
    sums = comm.make(spec, md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones(4, "f4")]
    sums.all_reduce([row], [row], threads=1)


if __name__ == "__main__":
    mistake(md.connect())
