"""Two sums, the same in both ranks, but the other way round."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"worker:0: all_reduce float32\[5\].* worker:1: all_reduce float32\[3\]"


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    rows = [[np.ones(5, "f4")], [np.ones(3, "f4")]]
    for row in rows if cluster.task == 0 else reversed(rows):
        sums.all_reduce([row], [row], threads=1)


if __name__ == "__main__":
    mistake(md.connect())
