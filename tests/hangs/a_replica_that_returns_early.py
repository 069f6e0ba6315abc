"""A replica has no data left and returns, while the others wait for its gradients."""

import minidist as md
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"replica 2 finished 'step' .* after 0"


def hang():
    with md.Strategy("cpu*3", deadline=0.3) as strategy:
        with strategy.scope():
            w = md.Variable([1.0, 2.0], name="w")
        optimizer = md.optim.SGD(0.1)

        def step():
            if md.get_replica_context().replica_id < 2:
                optimizer.minimize(lambda: md.ops.reduce_sum(w), [w])

        strategy.run(step)
