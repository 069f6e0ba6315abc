"""A merge function lets a stream write what the replicas read when they go on."""

import minidist as md


def program(waits):
    with md.Strategy("cpu*2") as strategy:
        device = strategy.devices[0]
        shared = device.copy_in(md.constant([1.0, 2.0]).numpy())

        def scale(strategy):
            stream = device.stream("communication")
            stream.submit(lambda: device.ops.fill(shared, 3))
            if waits:
                stream.synchronize()

        def step():
            md.get_replica_context().merge_call(scale)
            return device.ops.negative(shared)

        strategy.run(step)
        device.synchronize()


def bug():
    program(waits=False)


def cure():
    program(waits=True)
