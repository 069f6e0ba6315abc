"""The replicas sum two variables of one shape in another order."""

import minidist as md
from minidist.errors import MergeMismatchError

error = MergeMismatchError, "replica 0 the sum of variable 'a' .* replica 1 the sum of variable 'b'"


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:
        with strategy.scope():
            a, b = md.Variable([1.0], name="a"), md.Variable([2.0], name="b")

        def step():
            replica = md.get_replica_context()
            for variable in (a, b) if replica.replica_id == 0 else (b, a):
                replica.all_reduce("sum", variable)

        strategy.run(step)
