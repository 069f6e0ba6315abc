"""Each rank wants the sum for itself alone."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, "worker:0: reduce to replica 0; worker:1: reduce to replica 1"


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones(4, "f4")]
    sums.reduce([row], row, root=cluster.task, threads=1)


if __name__ == "__main__":
    mistake(md.connect())
