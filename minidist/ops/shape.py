"""Rearranging elements without computing on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.dtypes import as_dtype, is_narrow, kind
from minidist.errors import ShapeError, UsageError
from minidist.ops.convert import TensorLike, as_tensor, fit
from minidist.tape import record
from minidist.tensor import Tensor


def reshape(x: TensorLike, shape: Sequence[int]) -> Tensor:
    """Give the elements, in order, another shape; one length may be −1: whatever is left."""
    x = as_tensor(x)
    wanted = tuple(int(length) for length in shape)
    known = prod(length for length in wanted if length != -1)
    if wanted.count(-1) == 1 and known and x.size % known == 0:
        wanted = tuple(x.size // known if length == -1 else length for length in wanted)
    if min(wanted, default=0) < 0 or prod(wanted) != x.size:
        raise ShapeError(
            f"reshape: shapes {x.shape} and {tuple(shape)} do not hold the same number of elements"
        )
    ops = x.device.ops
    return record(ops.reshape(x.array, wanted), (x,), lambda dy, _: (ops.reshape(dy, x.shape),))


def transpose(x: TensorLike, axes: Sequence[int] | None = None) -> Tensor:
    """Put the axes in another order; None reverses them."""
    x = as_tensor(x)
    order = tuple(range(x.ndim))[::-1] if axes is None else tuple(axes)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"transpose: axes {order} are no order of the axes of shape {x.shape}")
    inverse = tuple(order.index(i) for i in range(x.ndim))
    ops = x.device.ops
    return record(ops.transpose(x.array, order), (x,), lambda dy, _: (ops.transpose(dy, inverse),))


def take(x: TensorLike, index: Any) -> Tensor:
    """x[index] with integers, slices, None and `...`. Raises IndexError outside the shape."""
    x = as_tensor(x)
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, bool) or not (
            part is None or isinstance(part, (int, np.integer, slice, EllipsisType))
        ):
            raise ShapeError(
                f"indexing shape {x.shape} with {type(part).__name__}: integers, slices, None and "
                f"... are known"
            )
    ops = x.device.ops
    return record(ops.take(x.array, index), (x,), lambda dy, _: (ops.put(dy, index, x.shape),))


def concat(parts: Sequence[TensorLike]) -> Tensor:
    """Join along the last axis: [..., c₀], [..., c₁], … -> [..., c₀ + c₁ + …]."""
    tensors = [as_tensor(part) for part in parts]
    if not tensors:
        raise UsageError("concat: there is nothing to join; give at least one Tensor")
    fit("concat", *tensors)
    shapes = [tensor.shape for tensor in tensors]
    if not all(shapes) or len({shape[:-1] for shape in shapes}) > 1:
        raise ShapeError(
            f"concat: shapes {', '.join(map(str, shapes))} cannot be joined along the last axis; "
            f"all others must be equal"
        )
    ops = tensors[0].device.ops
    ends = list(accumulate(shape[-1] for shape in shapes))

    def backward(dy: Array, needs: Any) -> tuple[Array | None, ...]:
        places = zip(needs, [0, *ends], ends, strict=False)
        return tuple(
            ops.take(dy, (..., slice(first, end))) if need else None for need, first, end in places
        )

    y = ops.concatenate([tensor.array for tensor in tensors], len(shapes[0]) - 1)
    return record(y, tuple(tensors), backward)


def cast(x: TensorLike, dtype: Any) -> Tensor:
    """Convert to another dtype; between floating-point ones with a gradient, in x's dtype.

    Rounding is to the nearest, and what is too large becomes infinite.
    """
    x = as_tensor(x)
    target = as_dtype(dtype)
    ops = x.device.ops
    y = ops.cast(x.array, target)
    if kind(x.dtype) != "f" or kind(target) != "f":
        return Tensor(y, x.device)
    return record(y, (x,), lambda dy, _: (ops.cast(dy, x.dtype),))


def at_least_float32(x: Tensor) -> Tensor:
    """Return float16 and bfloat16 as float32, with a gradient, and anything else as it is."""
    return cast(x, "float32") if is_narrow(x.dtype) else x


def stop_gradient(x: TensorLike) -> Tensor:
    """Return the same values, which no gradient passes."""
    x = as_tensor(x)
    return Tensor(x.array, x.device)
