"""The next step's sum goes into the bucket that the replicas still apply: there is but one."""

import numpy as np

import minidist as md


def program(buckets):
    with md.Strategy("cpu*2") as strategy:
        device = strategy.devices[0]
        stream = device.stream("communication")
        gradient = device.copy_in(np.ones(4, "float32"))
        rows = [device.copy_in(np.zeros(4, "float32")) for _ in range(buckets)]
        weights = [each.copy_in(np.ones(4, "float32")) for each in strategy.devices]
        done = [stream.record()]

        def reduce(strategy, step):
            done[-1].wait()
            stream.submit(lambda: device.ops.sum([[rows[step % buckets]]], [[gradient]]))
            done.append(stream.record())

        def train():
            replica = md.get_replica_context()
            for step in range(3):
                replica.merge_call(reduce, step)
                last = rows[(step - 1) % buckets]  # relaxed: what was summed a step ago
                how = {"lr": 0.1, "scale": 0.5, "weight_decay": [0.0], "threads": 1}
                replica.device.ops.sgd([weights[replica.replica_id]], [last], **how)

        strategy.run(train)
        stream.synchronize()


def bug():
    program(buckets=1)


def cure():
    program(buckets=2)
