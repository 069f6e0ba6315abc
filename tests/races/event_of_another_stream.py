"""A sum waits for the wrong stream: not for the one that copies its source."""

import numpy as np

import minidist as md


def program(role):
    (device,) = md.devices("cpu*1")
    source, total = (device.allocate((4,), "float32") for _ in range(2))
    device.stream("copy").copy(source, np.ones(4, "float32"))
    communication = device.stream("communication")
    communication.wait(device.stream(role).record())
    communication.submit(lambda: device.ops.sum([[total]], [[source]]))
    communication.synchronize()


def bug():
    program("compute")


def cure():
    program("copy")
