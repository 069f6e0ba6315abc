"""A copy stream fills a buffer, and who reads it does not wait for that."""

import numpy as np

import minidist as md


def program(waits):
    (device,) = md.devices("cpu*1")
    buffer = device.allocate((4,), "float32")
    stream = device.stream("copy")
    stream.copy(buffer, np.ones(4, "float32"))
    if waits:
        stream.synchronize()
    return device.ops.negative(buffer)


def bug():
    program(waits=False)


def cure():
    program(waits=True)
