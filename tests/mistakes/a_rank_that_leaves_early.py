"""One rank has fewer batches than the other, and ends."""

import numpy as np

import minidist as md
from minidist.errors import PeerError

error = {1: (PeerError, "worker:0 .* has ended after .* must take the same number of steps")}


def mistake(cluster):
    with md.Strategy("cpu", "collective_all_reduce", cluster=cluster) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(4, "f4"), name="w")
        optimizer = md.optim.SGD(0.1)

        def step():
            optimizer.apply_gradients([(md.constant(np.ones(4, "f4")), w)])

        for _ in range(2 + cluster.task):
            strategy.run(step)


if __name__ == "__main__":
    mistake(md.connect())
