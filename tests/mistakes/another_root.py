"""Each rank broadcasts what it has itself."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import MergeMismatchError

error = MergeMismatchError, "worker:0: .* from replica 0; worker:1: .* from replica 1"


def mistake(cluster):
    sums = comm.make("auto", md.devices("cpu"), peers=cluster.peers(), counts=[1, 1])
    row = [np.full(4, cluster.task, "f4")]
    sums.broadcast([row], root=cluster.task)


if __name__ == "__main__":
    mistake(md.connect())
