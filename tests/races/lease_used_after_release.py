"""A lease's buffer is read after it was released, when it may be anybody's."""

import minidist as md


def program(late):
    (device,) = md.devices("cpu*1")
    lease = device.lease((4,), "float32")
    array = lease.array
    device.ops.fill(array, 1)
    if not late:
        device.ops.negative(array)
    lease.release()
    if late:
        device.ops.negative(array)


def bug():
    program(late=True)


def cure():
    program(late=False)
