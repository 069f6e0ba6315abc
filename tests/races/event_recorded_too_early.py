"""An event is recorded before the work that it should be the end of."""

import numpy as np

import minidist as md


def program(early):
    (device,) = md.devices("cpu*1")
    buffer = device.allocate((4,), "float32")
    stream = device.stream("copy")
    event = stream.record()
    stream.copy(buffer, np.ones(4, "float32"))
    if not early:
        event = stream.record()
    event.wait()
    device.ops.fill(buffer, 0)


def bug():
    program(early=True)


def cure():
    program(early=False)
