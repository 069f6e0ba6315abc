"""What was put with `unchanged=True` is changed before the event that `put` gives."""

import minidist as md


def program(waits):
    (device,) = md.devices("cpu*1")
    value = md.constant([1.0, 2.0])
    area = md.StagingArea("float32", device=device)
    event = area.put(value, unchanged=True)
    if waits:
        event.wait()
    device.ops.fill(value.array, 0)
    area.get()
    area.close()


def bug():
    program(waits=False)


def cure():
    program(waits=True)
