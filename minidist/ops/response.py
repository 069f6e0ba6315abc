"""Local response normalisation (Krizhevsky, Sutskever and Hinton, 2012): channels that compete."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.device.ops import Shape
from minidist.errors import ShapeError, UsageError
from minidist.ops.convert import TensorLike, floats
from minidist.tape import record
from minidist.tensor import Tensor


def local_response_norm(
    x: TensorLike, radius: int = 5, bias: float = 1.0, alpha: float = 1.0, beta: float = 0.5
) -> Tensor:
    """Divide by the size of neighbouring channels, as TensorFlow's lrn: [..., c] -> [..., c].

    y[i] = x[i]/s[i]^β with s[i] = bias + α·Σ x[j]², over the channels j from i − radius to
    i + radius that there are. That sum is a product with a matrix whose band holds α, and 0 beside
    it: so a NaN, or an infinite square, also reaches the channels that are farther away.
    Raises UsageError for a radius that is not whole, a radius or an alpha below 0, or a bias not
    above 0.
    """
    check(radius, bias, alpha)
    x = floats("local_response_norm", x)
    if not x.shape:
        raise ShapeError("local_response_norm: x of shape () has no last axis to normalise along")
    device, channels = x.device, x.shape[-1]
    ops = device.ops
    rows: Shape = (prod(x.shape[:-1]), channels)

    def around(a: Array) -> Array:
        """Return α·Σ a[j] over the neighbours."""
        places = np.arange(channels)
        near = np.abs(places[:, None] - places) <= radius
        band = device.copy_in((alpha * near).astype(a.dtype))
        return ops.reshape(ops.matmul(ops.reshape(a, rows), band), a.shape)

    def sums(x: Array) -> Array:
        return ops.add(around(ops.multiply(x, x)), ops.full((), bias, x.dtype))

    def forward(x: Array) -> Array:
        return ops.multiply(x, ops.power(sums(x), -beta))

    def slope(dy: Array, x: Array) -> Array:
        s = sums(x)
        direct = ops.multiply(dy, ops.power(s, -beta))
        to_sums = ops.multiply(around(ops.divide(ops.multiply(direct, x), s)), x)
        return ops.subtract(direct, ops.multiply(to_sums, ops.full((), 2 * beta, x.dtype)))

    return record(
        ops.at_once(forward, x.array), (x,), lambda dy, _: (ops.at_once(slope, dy, x.array),)
    )


def check(radius: Any, bias: float, alpha: float) -> None:
    """Raise UsageError for numbers whose sums need not be above 0."""
    whole = isinstance(radius, int | np.integer) and not isinstance(radius, bool)
    if not whole or radius < 0 or not alpha >= 0 or not bias > 0:
        raise UsageError(
            f"local_response_norm: radius {radius}, alpha {alpha} and bias {bias} may give a sum "
            f"of 0 or less; take a whole radius and an alpha of at least 0 and a bias above 0"
        )
