"""Two-dimensional convolution."""

from __future__ import annotations

from typing import Any

from minidist.device.base import Array
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, fit, floats, operands
from minidist.ops.window import Padding, Pair, window
from minidist.tape import record
from minidist.tensor import Tensor


def conv2d(
    x: TensorLike,
    w: TensorLike,
    strides: Pair = 1,
    padding: Padding = "SAME",
    bias: TensorLike | None = None,
    relu: bool = False,
) -> Tensor:
    """Cross-correlate images with filters: [n, h, w, c], [kh, kw, c, k] -> [n, oh, ow, k].

    Channels are last, as they are everywhere here. `padding` is "SAME", "VALID" or ((top, bottom),
    (left, right)); see `ops/window.py` for the lengths. A bias [k] is added and the ReLU taken in
    the same pass.
    """
    x, w = operands("conv2d", x, w)
    floats("conv2d", x)
    if x.ndim != 4 or w.ndim != 4 or x.shape[3] != w.shape[2]:
        raise ShapeError(
            f"conv2d: images {x.shape} and filters {w.shape} do not fit; [n, height, width, c] and "
            f"[height, width, c, k] do"
        )
    where = window("conv2d", x.shape, w.shape[:2], strides, padding)
    ops = x.device.ops
    if bias is None:
        y = ops.conv2d(x.array, w.array, where, None, relu)
    else:
        bias = floats("conv2d", bias)
        fit("conv2d", w, bias)
        if bias.shape != w.shape[3:]:
            raise ShapeError(
                f"conv2d: the bias {bias.shape} does not fit filters {w.shape}; [k] does"
            )
        y = ops.conv2d(x.array, w.array, where, bias.array, relu)

    def backward(dy: Array, needs: Any) -> tuple[Array | None, ...]:
        dbias = None
        if bias is not None:
            dy, dbias = ops.bias_backward(dy, y if relu else None)
        elif relu:
            dy = ops.relu_backward(dy, y)
        return (
            ops.conv2d_backward_input(dy, w.array, x.shape, where) if needs[0] else None,
            ops.conv2d_backward_filter(x.array, dy, w.shape, where) if needs[1] else None,
            dbias,
        )[: len(needs)]

    return record(y, (x, w) if bias is None else (x, w, bias), backward)
