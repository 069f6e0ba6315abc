"""What the replicas reduce differs in shape."""

import minidist as md
from minidist.errors import ShapeError

error = (
    ShapeError,
    r"replica 0 has float32\[2\] and replica 1 has float32\[3\](?s:.*)met in 'step' at .*:\d+",
)


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            replica.all_reduce("sum", md.constant([1.0] * (2 + replica.replica_id)))

        strategy.run(step)
