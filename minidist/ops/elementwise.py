"""Arithmetic element by element; shapes broadcast as in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.device.ops import Ops, Shape
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, floats, operands
from minidist.tape import record
from minidist.tensor import Tensor


def add(a: TensorLike, b: TensorLike) -> Tensor:
    """a + b."""
    a, b = _broadcastable("add", a, b)
    ops = a.device.ops
    return record(
        ops.add(a.array, b.array),
        (a, b),
        lambda dy, needs: (
            _fold(ops, dy, a.shape) if needs[0] else None,
            _fold(ops, dy, b.shape) if needs[1] else None,
        ),
    )


def subtract(a: TensorLike, b: TensorLike) -> Tensor:
    """a − b."""
    a, b = _broadcastable("subtract", a, b)
    ops = a.device.ops
    return record(
        ops.subtract(a.array, b.array),
        (a, b),
        lambda dy, needs: (
            _fold(ops, dy, a.shape) if needs[0] else None,
            ops.negative(_fold(ops, dy, b.shape)) if needs[1] else None,
        ),
    )


def multiply(a: TensorLike, b: TensorLike) -> Tensor:
    """a·b."""
    a, b = _broadcastable("multiply", a, b)
    ops = a.device.ops
    return record(
        ops.multiply(a.array, b.array),
        (a, b),
        lambda dy, needs: (
            _folded_product(ops, dy, b.array, a.shape) if needs[0] else None,
            _folded_product(ops, dy, a.array, b.shape) if needs[1] else None,
        ),
    )


def divide(a: TensorLike, b: TensorLike) -> Tensor:
    """a/b, floating point."""
    a, b = _broadcastable("divide", a, b)
    floats("divide", a)
    ops = a.device.ops
    y = ops.divide(a.array, b.array)

    def backward(dy: Array, needs: Any) -> Any:
        def slopes(dy: Array, b_array: Array, y: Array) -> tuple[Array | None, Array | None]:
            da = ops.divide(dy, b_array)
            db = ops.negative(_fold(ops, ops.multiply(da, y), b.shape)) if needs[1] else None
            return _fold(ops, da, a.shape) if needs[0] else None, db

        return ops.at_once(slopes, dy, b.array, y)

    return record(y, (a, b), backward)


def negative(x: TensorLike) -> Tensor:
    """−x."""
    x = floats("negative", x)
    ops = x.device.ops
    return record(ops.negative(x.array), (x,), lambda dy, _: (ops.negative(dy),))


def exp(x: TensorLike) -> Tensor:
    """e to the power of x."""
    x = floats("exp", x)
    ops = x.device.ops
    y = ops.exp(x.array)
    return record(y, (x,), lambda dy, _: (ops.multiply(dy, y),))


def log(x: TensorLike) -> Tensor:
    """Natural logarithm."""
    x = floats("log", x)
    ops = x.device.ops
    return record(ops.log(x.array), (x,), lambda dy, _: (ops.divide(dy, x.array),))


def sqrt(x: TensorLike) -> Tensor:
    """Square root; its derivative 1/(2y) is infinite at 0."""
    x = floats("sqrt", x)
    ops = x.device.ops
    y = ops.sqrt(x.array)

    def slope(dy: Array, y: Array) -> Array:
        return ops.divide(dy, ops.add(y, y))

    return record(y, (x,), lambda dy, _: (ops.at_once(slope, dy, y),))


def square(x: TensorLike) -> Tensor:
    """x²."""
    x = floats("square", x)
    ops = x.device.ops

    def slope(dy: Array, x: Array) -> Array:
        return ops.multiply(dy, ops.add(x, x))

    return record(
        ops.multiply(x.array, x.array), (x,), lambda dy, _: (ops.at_once(slope, dy, x.array),)
    )


def power(x: TensorLike, exponent: float) -> Tensor:
    """x to the power of a constant number."""
    if not isinstance(exponent, (int, float)):
        raise TypeError(f"power: the exponent must be a number, not {type(exponent).__name__}")
    if exponent == 2:
        return square(x)
    x = floats("power", x)
    ops, p = x.device.ops, float(exponent)

    def slope(dy: Array, x: Array) -> Array:
        if p == 0:  # p·x^(p−1) would be 0·∞ at x = 0
            return ops.full(x.shape, 0, x.dtype)
        return ops.multiply(dy, ops.multiply(ops.power(x, p - 1), ops.full((), p, x.dtype)))

    return record(ops.power(x.array, p), (x,), lambda dy, _: (ops.at_once(slope, dy, x.array),))


def equal(a: TensorLike, b: TensorLike) -> Tensor:
    """a = b as bools; no gradient."""
    return _compare("equal", a, b)


def less(a: TensorLike, b: TensorLike) -> Tensor:
    """a < b as bools; no gradient."""
    return _compare("less", a, b)


def less_equal(a: TensorLike, b: TensorLike) -> Tensor:
    """a ≤ b as bools; no gradient."""
    return _compare("less_equal", a, b)


def _compare(relation: str, a: TensorLike, b: TensorLike) -> Tensor:
    a, b = _broadcastable(relation, a, b)
    return Tensor(a.device.ops.compare(relation, a.array, b.array), a.device)


def _broadcastable(operation: str, a: TensorLike, b: TensorLike) -> tuple[Tensor, Tensor]:
    a, b = operands(operation, a, b)
    if a.shape != b.shape:
        try:
            np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise ShapeError(
                f"{operation}: shapes {a.shape} and {b.shape} do not broadcast; lengths must be "
                f"equal from the last axis on, or 1"
            ) from None
    return a, b


def _folded_product(ops: Ops, dy: Array, factor: Array, shape: Shape) -> Array:
    def product(dy: Array, factor: Array) -> Array:
        return _fold(ops, ops.multiply(dy, factor), shape)

    return ops.at_once(product, dy, factor)


def _fold(ops: Ops, dy: Array, shape: Shape) -> Array:
    """Sum over the axes along which an input of `shape` was broadcast; `dy` itself if none."""
    if dy.shape == shape:
        return dy
    lead = dy.ndim - len(shape)
    axes = tuple(i for i, length in enumerate(dy.shape) if i < lead or shape[i - lead] != length)
    return ops.reshape(ops.reduce_sum(dy, axes, False), shape)
