"""A replica updates a parameter server's only copy, outside a meeting; another fetches it."""

import minidist as md


def program(meets):
    with md.Strategy("cpu*2", "parameter_server") as strategy:
        with strategy.scope():
            w = md.Variable([1.0, 2.0], name="w")

        def update(strategy=None):
            copy = w.copies[0]
            gradient = copy.device.ops.full((2,), 1.0, "float32")
            how = {"lr": 0.1, "scale": 1.0, "weight_decay": [0.0], "threads": 1}
            copy.device.ops.sgd([copy.array], [gradient], **how)

        def step():
            replica = md.get_replica_context()
            loss = md.ops.reduce_sum(w.read())
            if meets:
                replica.merge_call(update)
            elif replica.replica_id == 0:
                update()
            return loss

        strategy.run(step)


def bug():
    program(meets=False)


def cure():
    program(meets=True)
