"""The replicas bring gradients for the same variables in another order."""

import minidist as md
from minidist.errors import MergeMismatchError

error = MergeMismatchError, r"\['a', 'b'\] and \['b', 'a'\](?s:.*)met in 'step' at .*:\d+"


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:
        with strategy.scope():
            a, b = md.Variable([1.0], name="a"), md.Variable([2.0], name="b")
        optimizer = md.optim.SGD(0.1)

        def step():
            variables = [a, b] if md.get_replica_context().replica_id == 0 else [b, a]
            optimizer.minimize(lambda: md.ops.reduce_sum(a + b), variables)

        strategy.run(step)
