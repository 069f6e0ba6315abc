"""Matrix products, with or without a bias."""

from __future__ import annotations

from typing import Any

from minidist.device.base import Array
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, fit, floats, operands
from minidist.tape import bucket_of, record
from minidist.tensor import Tensor


def matmul(a: TensorLike, b: TensorLike) -> Tensor:
    """a @ b: [..., n, k], [..., k, m] -> [..., n, m]; axes before these two are equal in both."""
    a, b = operands("matmul", a, b)
    floats("matmul", a)
    stacked = a.ndim == b.ndim >= 2 and a.shape[:-2] == b.shape[:-2]
    if not stacked or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul: shapes {a.shape} and {b.shape} do not multiply; [n, k] and [k, m] do, behind "
            f"equal axes"
        )
    ops = a.device.ops
    return record(
        ops.matmul(a.array, b.array),
        (a, b),
        lambda dy, needs: (
            ops.matmul(dy, b.array, transpose_b=True) if needs[0] else None,
            ops.matmul(a.array, dy, transpose_a=True, out=bucket_of(needs[1]))
            if needs[1]
            else None,
        ),
    )


def dense(x: TensorLike, w: TensorLike, bias: TensorLike, relu: bool = False) -> Tensor:
    """x @ w + bias, or its ReLU, in one pass: [n, k], [k, m], [m] -> [n, m]."""
    x, w = operands("dense", x, w)
    bias = floats("dense", bias)
    fit("dense", w, bias)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or bias.shape != w.shape[1:]:
        raise ShapeError(
            f"dense: shapes {x.shape}, {w.shape} and {bias.shape} do not fit; [n, k], [k, m] and "
            f"[m] do"
        )
    ops = x.device.ops
    y = ops.dense(x.array, w.array, bias.array, relu)

    def backward(dy: Array, needs: Any) -> tuple[Array | None, ...]:
        dz, dbias = ops.bias_backward(dy, y if relu else None)
        return (
            ops.matmul(dz, w.array, transpose_b=True) if needs[0] else None,
            ops.matmul(x.array, dz, transpose_a=True, out=bucket_of(needs[1]))
            if needs[1]
            else None,
            dbias,
        )

    return record(y, (x, w, bias), backward)


def bias_add(x: TensorLike, bias: TensorLike) -> Tensor:
    """x + bias along the last axis: [..., k], [k] -> [..., k]."""
    x, bias = operands("bias_add", x, bias)
    if not x.shape or bias.shape != x.shape[-1:]:
        raise ShapeError(
            f"bias_add: shapes {x.shape} and {bias.shape} do not fit; [..., k] and [k] do"
        )
    ops = x.device.ops
    axes = tuple(range(x.ndim - 1))
    return record(
        ops.add(x.array, bias.array),
        (x, bias),
        lambda dy, needs: (
            dy if needs[0] else None,
            ops.reduce_sum(dy, axes, False) if needs[1] else None,
        ),
    )
