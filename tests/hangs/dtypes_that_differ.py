"""What the replicas reduce differs in dtype."""

import minidist as md
from minidist.errors import ShapeError

error = ShapeError, r"replica 0 has float32\[1\] and replica 1 has float64\[1\]"


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            dtype = "float64" if replica.replica_id else "float32"
            replica.all_reduce("sum", md.constant([1.0], dtype))

        strategy.run(step)
