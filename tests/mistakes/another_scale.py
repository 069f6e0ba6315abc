"""One rank wants the sum, the other the mean."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"worker:0: .* and 1\.0 .*worker:1: .* and 0\.5 "


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.ones(4, "f4")]
    sums.all_reduce([row], [row], scale=1 / (1 + cluster.task), threads=1)


if __name__ == "__main__":
    mistake(md.connect())
