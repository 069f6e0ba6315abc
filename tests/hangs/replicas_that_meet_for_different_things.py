"""A replica merges with another function than the others."""

import minidist as md
from minidist.errors import MergeMismatchError

error = (
    MergeMismatchError,
    r"replica 0 in 'step' at .*:\d+ with .*save.*, replica 1 in 'step' at .*:\d+ with .*log",
)


def hang():
    def save(strategy):
        pass

    def log(strategy):
        pass

    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            if replica.replica_id == 0:
                replica.merge_call(save)
            replica.merge_call(log)
            if replica.replica_id == 1:
                replica.merge_call(save)

        strategy.run(step)
