"""A leased buffer goes back to its pool while a copy out of it is still to be done."""

import minidist as md


def program(with_event):
    (device,) = md.devices("cpu*1")
    stream = device.stream("copy")
    target = device.allocate((4,), "float32")
    lease = device.lease((4,), "float32")
    device.ops.fill(lease.array, 1)
    stream.copy(target, lease.array)
    lease.release([stream.record()] if with_event else [])
    again = device.lease((4,), "float32")  # the same buffer, or if it is still read another
    device.ops.fill(again.array, 2)
    stream.synchronize()
    again.release()


def bug():
    program(with_event=False)


def cure():
    program(with_event=True)
