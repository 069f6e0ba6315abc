"""One rank fails while the other waits for it in a sum."""

import minidist as md
from minidist.errors import PeerError

error = {0: (PeerError, "worker:1 .* has failed .*ValueError: no such file"), 1: (ValueError, "no")}


def mistake(cluster):
    with md.Strategy("cpu", "collective_all_reduce", cluster=cluster) as strategy:

        def step():
            if cluster.task == 1:
                raise ValueError("no such file")
            return md.get_replica_context().all_reduce("sum", md.constant(1.0))

        strategy.run(step)


if __name__ == "__main__":
    mistake(md.connect())
