"""Two replicas fill one cache, each when it finds it empty: no lock that hands it over."""

import minidist as md
from minidist import observe


def program(lock):
    with md.Strategy("cpu*2") as strategy:
        device = strategy.devices[0]
        origin = md.constant([1.0, 2.0]).array
        cache = device.allocate((2,), "float32")
        full = []

        def fill():
            if not full:
                device.copy(cache, origin)
                full.append(True)
            return device.ops.negative(cache)

        def step():
            if lock is None:
                fill()
            else:
                with lock:
                    fill()

        strategy.run(step)


def bug():
    program(lock=None)


def cure():
    program(lock=observe.Lock(hands_over=True))
