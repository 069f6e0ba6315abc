"""The ranks do not agree how many examples are behind each gradient."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"worker:0: .* times \[3, 1\] .*worker:1: .* times \[1, 3\] "


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones(4, "f4")]
    weights = [3, 1] if cluster.task == 0 else [1, 3]
    sums.all_reduce([row], [row], weights, threads=1)


if __name__ == "__main__":
    mistake(md.connect())
