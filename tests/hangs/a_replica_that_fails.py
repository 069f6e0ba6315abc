"""A replica fails while the others wait for it: the error is its own."""

import minidist as md

error = KeyError, "labels"


def hang():
    with md.Strategy("cpu*3", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            if replica.replica_id == 2:
                raise KeyError("labels")
            replica.all_reduce("sum", 1.0)

        strategy.run(step)
