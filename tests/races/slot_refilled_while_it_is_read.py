"""Double buffering by hand: a slot is filled again without waiting for who reads it."""

import numpy as np

import minidist as md


def program(waits):
    (device,) = md.devices("cpu*1")
    copying, reading = device.stream("copy"), device.stream("communication")
    slots = [device.allocate((4,), "float32") for _ in range(2)]
    total = device.allocate((4,), "float32")
    device.ops.fill(total, 0)
    read = [reading.record()] * 2
    for step in range(4):
        slot = slots[step % 2]
        if waits:
            copying.wait(read[step % 2])
        copying.copy(slot, np.full(4, step, "float32"))
        reading.wait(copying.record())
        reading.submit(lambda slot=slot: device.ops.accumulate(total, slot))
        read[step % 2] = reading.record()
    reading.synchronize()


def bug():
    program(waits=False)


def cure():
    program(waits=True)
