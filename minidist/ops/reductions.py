"""Sums, means and the like over axes. Of nothing a sum and a mean are 0, with zero gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from minidist.device.base import Array
from minidist.device.ops import Axis
from minidist.dtypes import kind
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, as_tensor, floats
from minidist.ops.shape import at_least_float32
from minidist.tape import record
from minidist.tensor import Tensor

Axes = int | Sequence[int] | None


def reduce_sum(x: TensorLike, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Sum over `axis` (an integer, several, or None: all); integers stay integers."""
    x = as_tensor(x)
    if kind(x.dtype) not in "iu":
        x = floats("reduce_sum", x)
    ops = x.device.ops
    axes, kept = _axes("reduce_sum", x, axis)

    def backward(dy: Array, _: Any) -> tuple[Array]:
        return (ops.broadcast_to(ops.reshape(dy, kept), x.shape),)

    return record(ops.reduce_sum(x.array, axes, keepdims), (x,), backward)


def reduce_mean(x: TensorLike, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Mean over `axis` (an integer, several, or None: all); 0 where there is nothing."""
    x = floats("reduce_mean", x)
    ops = x.device.ops
    axes, kept = _axes("reduce_mean", x, axis)
    count = max(prod(x.shape[a] for a in axes), 1)

    def share(total: Array) -> Array:
        return ops.divide(total, ops.full((), count, total.dtype))

    def mean(x: Array) -> Array:
        return share(ops.reduce_sum(x, axes, keepdims))

    def backward(dy: Array, _: Any) -> tuple[Array]:
        return (ops.broadcast_to(ops.reshape(ops.at_once(share, dy), kept), x.shape),)

    return record(ops.at_once(mean, x.array), (x,), backward)


def l2_loss(w: TensorLike) -> Tensor:
    """Σ w²/2, any shape -> [], as TensorFlow's l2_loss: its gradient is w.

    Of float16 and bfloat16 it is float32, as losses are.
    """
    w = at_least_float32(floats("l2_loss", w))
    ops = w.device.ops
    axes = tuple(range(w.ndim))
    total = ops.reduce_sum(ops.multiply(w.array, w.array), axes, False)
    return record(
        ops.divide(total, ops.full((), 2, w.dtype)),
        (w,),
        lambda dy, _: (ops.multiply(w.array, dy),),
    )


def argmax(x: TensorLike, axis: int = -1) -> Tensor:
    """Index of the first greatest element along `axis`, int64; no gradient."""
    x = as_tensor(x)
    (along,), _ = _axes("argmax", x, axis)
    if not x.shape[along]:
        raise ShapeError(f"argmax: axis {axis} of shape {x.shape} has no elements")
    return Tensor(x.device.ops.argmax(x.array, along), x.device)


def _axes(operation: str, x: Tensor, axis: Axes) -> tuple[Axis, tuple[int, ...]]:
    """Return the axes, counted from 0 and in order, and the shape with those of length 1."""
    wanted = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted({a + x.ndim if a < 0 else a for a in wanted}))
    if len(axes) != len(wanted) or any(not 0 <= a < x.ndim for a in axes):
        raise ShapeError(
            f"{operation}: axis {axis} of shape {x.shape}; give different ones of "
            f"{-x.ndim} to {x.ndim - 1}"
        )
    return axes, tuple(1 if i in axes else length for i, length in enumerate(x.shape))
