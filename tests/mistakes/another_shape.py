"""The shapes of what is summed differ."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = (
    MergeMismatchError,
    r"worker:0: all_reduce float32\[6\].* worker:1: all_reduce float32\[2, 3\]",
)


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones([(6,), (2, 3)][cluster.task], "f4")]
    sums.all_reduce([row], [row], threads=1)


if __name__ == "__main__":
    mistake(md.connect())
