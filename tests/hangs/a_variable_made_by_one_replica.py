"""One replica makes a variable, which is a meeting of all."""

import minidist as md
from minidist.errors import MergeMismatchError

error = MergeMismatchError, "replica 1 finished 'step'"


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            if md.get_replica_context().replica_id == 0:
                md.Variable(1.0, name="mine")

        strategy.run(step)
