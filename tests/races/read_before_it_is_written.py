"""A buffer is used before anything was written to it: in the checking mode it holds NaN."""

import minidist as md
from minidist.errors import NonFiniteError

error = NonFiniteError, "NaN"


def program(fills):
    (device,) = md.devices("cpu*1")
    momentum = device.allocate((4,), "float32")
    if fills:
        device.ops.fill(momentum, 0)
    if device.ops.first_nonfinite([momentum]) != -1:
        raise NonFiniteError("the momentum holds NaN")


def bug():
    program(fills=False)


def cure():
    program(fills=True)
