"""One replica meets the others once more than they do."""

import minidist as md
from minidist.errors import MergeMismatchError

error = (
    MergeMismatchError,
    r"replica 0 finished 'step' at .* after 1, while replica 1 waits in .* number 2",
)


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            for _ in range(1 + replica.replica_id):
                replica.merge_call(lambda strategy: None)

        strategy.run(step)
