"""Depthwise convolution: each channel has a filter of its own."""

from __future__ import annotations

from typing import Any

from minidist.device.base import Array
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, floats, operands
from minidist.ops.window import Padding, Pair, window
from minidist.tape import record
from minidist.tensor import Tensor


def depthwise_conv2d(
    x: TensorLike, w: TensorLike, strides: Pair = 1, padding: Padding = "SAME"
) -> Tensor:
    """Cross-correlate each channel with its filter: [n, h, w, c], [kh, kw, c] -> [n, oh, ow, c].

    `padding` is that of `conv2d`.
    """
    x, w = operands("depthwise_conv2d", x, w)
    floats("depthwise_conv2d", x)
    if x.ndim != 4 or w.ndim != 3 or x.shape[3] != w.shape[2]:
        raise ShapeError(
            f"depthwise_conv2d: images {x.shape} and filters {w.shape} do not fit; [n, height, "
            f"width, c] and [height, width, c] do"
        )
    where = window("depthwise_conv2d", x.shape, w.shape[:2], strides, padding)
    ops = x.device.ops

    def backward(dy: Array, needs: Any) -> tuple[Array | None, ...]:
        return (
            ops.depthwise_conv2d_backward_input(dy, w.array, x.shape, where) if needs[0] else None,
            ops.depthwise_conv2d_backward_filter(x.array, dy, where) if needs[1] else None,
        )

    return record(ops.depthwise_conv2d(x.array, w.array, where), (x, w), backward)
