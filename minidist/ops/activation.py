"""Activations: ReLU, ReLU6 and GELU, dropout and the softmax pair."""

from __future__ import annotations

from minidist.device.base import Array
from minidist.device.ops import Words
from minidist.errors import ShapeError, UsageError
from minidist.ops.convert import TensorLike, floats
from minidist.tape import record
from minidist.tensor import Tensor


def relu(x: TensorLike) -> Tensor:
    """max(x, 0), any shape. The derivative at 0 is 0."""
    x = floats("relu", x)
    ops = x.device.ops
    y = ops.relu(x.array)
    return record(y, (x,), lambda dy, _: (ops.relu_backward(dy, y),))


def relu6(x: TensorLike) -> Tensor:
    """min(max(x, 0), 6), any shape. The derivative at 0 and at 6 is 0."""
    x = floats("relu6", x)
    ops = x.device.ops
    y = ops.relu6(x.array)
    return record(y, (x,), lambda dy, _: (ops.relu6_backward(dy, y),))


def gelu(x: TensorLike) -> Tensor:
    """x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2, any shape (Hendrycks and Gimpel, 2016).

    It differs by at most 0.0005 from x·P(X < x) for a standard normal X.
    """
    x = floats("gelu", x)
    ops = x.device.ops
    return record(ops.gelu(x.array), (x,), lambda dy, _: (ops.gelu_backward(dy, x.array),))


def dropout(x: TensorLike, rate: float, key: Words, counter: Words) -> Tensor:
    """Set elements to 0 with probability `rate` and divide the others by 1 − rate, any shape.

    Which ones is decided by the Philox stream of `key` (two 32-bit words) and `counter` (three),
    as `context.draw` gives them: the same words, the same elements.
    """
    if not 0 <= rate < 1:
        raise UsageError(f"dropout: the rate is {rate}; it must be at least 0 and less than 1")
    x = floats("dropout", x)
    ops = x.device.ops
    return record(
        ops.dropout(x.array, rate, key, counter),
        (x,),
        lambda dy, _: (ops.dropout(dy, rate, key, counter),),
    )


def softmax(x: TensorLike) -> Tensor:
    """exp(x)/Σ exp(x) along the last axis, [..., k] -> [..., k]."""
    x = _with_axis("softmax", x)
    ops = x.device.ops
    y = ops.softmax(x.array)

    def slope(dy: Array, y: Array) -> Array:
        inner = ops.reduce_sum(ops.multiply(dy, y), (y.ndim - 1,), True)
        return ops.multiply(y, ops.subtract(dy, inner))

    return record(y, (x,), lambda dy, _: (ops.at_once(slope, dy, y),))


def log_softmax(x: TensorLike) -> Tensor:
    """x − log Σ exp(x) along the last axis, [..., k] -> [..., k]."""
    x = _with_axis("log_softmax", x)
    ops = x.device.ops
    y = ops.log_softmax(x.array)

    def slope(dy: Array, y: Array) -> Array:
        total = ops.reduce_sum(dy, (y.ndim - 1,), True)
        return ops.subtract(dy, ops.multiply(ops.exp(y), total))

    return record(y, (x,), lambda dy, _: (ops.at_once(slope, dy, y),))


def _with_axis(operation: str, x: TensorLike) -> Tensor:
    x = floats(operation, x)
    if not x.shape or not x.shape[-1]:
        raise ShapeError(f"{operation}: shape {x.shape} has no last axis to go along")
    return x
