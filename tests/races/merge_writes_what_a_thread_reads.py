"""A merge function writes what a replica lets a thread of its own read meanwhile."""

import threading

import minidist as md


def program(joins_first):
    with md.Strategy("cpu*2") as strategy:

        def clear(strategy, values):
            for value in strategy.local_results(values):
                value.device.ops.fill(value.array, 0)

        def step():
            replica = md.get_replica_context()
            value = md.constant([1.0, 2.0]) if replica.replica_id else md.constant([3.0, 4.0])
            reader = threading.Thread(target=lambda: replica.device.ops.negative(value.array))
            reader.start()
            if joins_first:
                reader.join()
            try:
                replica.merge_call(clear, value)
            finally:
                reader.join()

        strategy.run(step)


def bug():
    program(joins_first=False)


def cure():
    program(joins_first=True)
