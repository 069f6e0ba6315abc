"""A sum keeps its scratch buffer instead of leasing one for each call: two calls share it."""

import numpy as np

import minidist as md
from minidist.comm.scratch import Scratch


class Summing:
    """Sums in a buffer, then stores it."""

    def __init__(self, device, leases):
        self.device, self.leases = device, leases
        self.kept = device.allocate((4,), "float32")

    def __call__(self, parts, destination):
        with Scratch() as scratch:
            total = scratch.flat(self.device, 4, np.dtype("float32")) if self.leases else self.kept
            self.device.ops.sum([[total]], [[part] for part in parts])
            self.device.copy(destination, total)


def program(leases):
    devices = md.devices("cpu*2")
    summing = Summing(devices[0], leases)
    for device in devices:
        array = device.copy_in(np.ones(4, "float32"))
        device.stream("communication").submit(lambda array=array: summing([array, array], array))
    for device in devices:
        device.synchronize()


def bug():
    program(leases=False)


def cure():
    program(leases=True)
