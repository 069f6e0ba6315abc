"""A communicator keeps its scratch buffer instead of leasing one for each call: two calls share it."""

import numpy as np

import minidist as md
from minidist import comm
from minidist.comm.scratch import Scratch


class Keeping(comm.Communicator):
    """Sums in a buffer, then stores it."""

    order = "serial"

    def __init__(self, device, leases):
        self.device, self.leases = device, leases
        self.kept = device.allocate((4,), "float32")

    def _all_reduce(self, sources, destinations, weights, scale, threads):
        with Scratch() as scratch:
            total = (
                scratch.flat(self.device, 4, np.dtype("float32")) if self.leases else self.kept
            )
            self.device.ops.sum([[total]], sources)
            for row in destinations:
                self.device.copy(row[0], total)


def program(leases):
    device, other = md.devices("cpu*2")
    communicator = Keeping(device, leases)
    for stream in (device.stream("communication"), other.stream("communication")):
        row = [device.copy_in(np.ones(4, "float32"))]
        stream.submit(lambda row=row: communicator.all_reduce([row, row], [row], threads=1))
    device.synchronize()
    other.synchronize()


def bug():
    program(leases=False)


def cure():
    program(leases=True)
