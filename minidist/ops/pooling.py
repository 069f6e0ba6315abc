"""Pooling: the greatest or the mean of each window."""

from __future__ import annotations

from minidist.device.ops import Window
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, floats
from minidist.ops.window import Padding, Pair, window
from minidist.tape import record
from minidist.tensor import Tensor


def max_pool(
    x: TensorLike, size: Pair, strides: Pair | None = None, padding: Padding = "VALID"
) -> Tensor:
    """Greatest element of each window: [n, h, w, c] -> [n, oh, ow, c]; strides default to `size`.

    Padding never wins; of equal elements the first, row by row, gets the gradient.
    """
    x, where = _pooled("max_pool", x, size, strides, padding)
    ops = x.device.ops
    y, saved = ops.max_pool(x.array, where)
    return record(y, (x,), lambda dy, _: (ops.max_pool_backward(dy, saved, x.shape, where),))


def average_pool(
    x: TensorLike, size: Pair, strides: Pair | None = None, padding: Padding = "VALID"
) -> Tensor:
    """Mean of each window: [n, h, w, c] -> [n, oh, ow, c]; strides default to `size`.

    Padding does not count: at an edge the mean is over fewer elements.
    """
    x, where = _pooled("average_pool", x, size, strides, padding)
    ops = x.device.ops
    return record(
        ops.average_pool(x.array, where),
        (x,),
        lambda dy, _: (ops.average_pool_backward(dy, x.shape, where),),
    )


def _pooled(
    operation: str, x: TensorLike, size: Pair, strides: Pair | None, padding: Padding
) -> tuple[Tensor, Window]:
    x = floats(operation, x)
    if x.ndim != 4:
        raise ShapeError(f"{operation}: images of shape {x.shape}; [n, height, width, c] is needed")
    return x, window(operation, x.shape, size, size if strides is None else strides, padding)
