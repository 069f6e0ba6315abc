"""One rank waits for something else for ever, and the other one for it."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.errors import HangError

error = {0: (HangError, "worker:0 has waited for worker:1 .* to all_reduce")}


def mistake(cluster):
    peers = cluster.peers(patience=lambda: (0.1, 0.3))
    sums = comm.make("auto", md.devices("cpu"), peers=peers, counts=[1, 1])
    row = [np.ones(4, "f4")]
    if cluster.task == 0:
        sums.all_reduce([row], [row], threads=1)


if __name__ == "__main__":
    mistake(md.connect())
