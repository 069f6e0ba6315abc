"""Gradients are summed on the communication stream, and applied before the sum is there."""

import numpy as np

import minidist as md
from minidist import comm


def program(waits):
    devices = md.devices("cpu*2")
    gradients = [[device.copy_in(np.ones(4, "float32"))] for device in devices]
    bucket = [devices[0].allocate((4,), "float32")]
    weights = [devices[0].copy_in(np.ones(4, "float32"))]
    ring = comm.make("xring", devices)
    stream = devices[0].stream("communication")
    stream.submit(lambda: ring.reduce(gradients, bucket, threads=1))
    if waits:
        stream.synchronize()
    how = {"lr": 0.1, "scale": 0.5, "weight_decay": [0.0], "threads": 1}
    devices[0].ops.sgd(weights, bucket, **how)
    stream.synchronize()


def bug():
    program(waits=False)


def cure():
    program(waits=True)
