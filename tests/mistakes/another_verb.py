"""One rank sums what the other one gathers."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"worker:0: all_reduce float32\[4\] .*worker:1: all_gather"


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones(4, "f4")]
    if cluster.task == 0:
        sums.all_reduce([row], [row], threads=1)
    else:
        sums.all_gather([row])


if __name__ == "__main__":
    mistake(md.connect())
