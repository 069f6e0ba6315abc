"""One rank sums float64 with the other's float32."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"worker:0: all_reduce float32.* worker:1: all_reduce float64"


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones(4, ["f4", "f8"][cluster.task])]
    sums.all_reduce([row], [row], threads=1)


if __name__ == "__main__":
    mistake(md.connect())
