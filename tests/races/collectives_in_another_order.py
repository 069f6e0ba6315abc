"""Two replicas reduce the same two values in another order: they sum apples and pears."""

import minidist as md
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"replica 0 .* at .*:\d+, and replica 1 .* at .*:\d+"


def program(same_order):
    with md.Strategy("cpu*2") as strategy:

        def step():
            replica = md.get_replica_context()
            loss, norm = md.constant(1.0), md.constant(2.0)
            if same_order or replica.replica_id == 0:
                return replica.all_reduce("mean", loss), replica.all_reduce("mean", norm)
            norm = replica.all_reduce("mean", norm)
            loss = replica.all_reduce("mean", loss)
            return loss, norm

        strategy.run(step)


def bug():
    program(same_order=False)


def cure():
    program(same_order=True)
