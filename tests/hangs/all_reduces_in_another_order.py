"""One replica takes the sum first, and the other the mean."""

import minidist as md
from minidist.errors import MergeMismatchError

error = MergeMismatchError, "replica 0 the sum in meeting 0, and replica 1 the mean in meeting 0"


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            for op in ("sum", "mean") if replica.replica_id == 0 else ("mean", "sum"):
                replica.all_reduce(op, md.constant([1.0]))

        strategy.run(step)
