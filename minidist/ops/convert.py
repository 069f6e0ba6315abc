"""What operations take: turn numbers, arrays and variables into Tensors that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist import context
from minidist.delegate import Delegate, current
from minidist.dtypes import as_array, is_narrow, kind
from minidist.errors import ContextError, ShapeError
from minidist.indexed_slices import IndexedSlices
from minidist.tape import Readable
from minidist.tensor import Tensor

# What an operation takes: a Tensor, a variable (anything with `read()`), an array, numbers; and a
# distributed value, for the component that the context is about.
TensorLike = (
    Tensor | Readable | Delegate | IndexedSlices | np.ndarray[Any, Any] | Sequence[Any] | float
)


def constant(value: TensorLike, dtype: Any = None) -> Tensor:
    """Return a copy of `value` on this thread's device.

    Python floats, alone or nested in lists, become float32 (see md.default_dtype), integers int64;
    what NumPy made keeps its dtype unless `dtype` ("float32", "bfloat16" …) is given. To a tape the
    result is no function of `value`.
    """
    if isinstance(value, Tensor | Delegate | IndexedSlices) or hasattr(value, "read"):
        value = as_tensor(value).numpy()
    array = as_array(value, dtype)
    own_dtype = isinstance(value, (np.ndarray, np.generic))
    if dtype is None and array.dtype == np.float64 and not own_dtype:
        array = as_array(array, context.frame().dtype)
    if kind(array.dtype) not in "fiub":
        raise ShapeError(
            f"constant: no Tensor can hold elements of type {array.dtype}; give numbers or booleans"
        )
    device = context.device()
    return Tensor(device.copy_in(array), device)


def as_tensor(value: TensorLike) -> Tensor:
    """Return `value` itself if it is a Tensor, what a variable reads as, else `constant(value)`.

    Of a distributed value it is the component that the context is about.
    IndexedSlices become dense.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Delegate):
        return as_tensor(value.get())
    if hasattr(value, "read"):
        tensor: Tensor = value.read()
        return tensor
    if isinstance(value, IndexedSlices):
        return value.to_dense()
    return constant(value)


def operands(operation: str, a: TensorLike, b: TensorLike) -> tuple[Tensor, Tensor]:
    """Return two Tensors of one dtype and device; a Python number takes the other's dtype.

    Raises ShapeError naming the operation if the dtypes differ, ContextError if the devices do.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        fit(operation, a, b)
        return a, b
    if _is_number(b) and not _is_number(a):
        a = as_tensor(a)
        return a, _number(operation, b, a)
    if _is_number(a) and not _is_number(b):
        b = as_tensor(b)
        return _number(operation, a, b), b
    if isinstance(a, Delegate) or isinstance(b, Delegate):
        return operands(operation, current(a), current(b))
    a, b = as_tensor(a), as_tensor(b)
    fit(operation, a, b)
    return a, b


def fit(operation: str, *tensors: Tensor) -> None:
    """Raise ShapeError if the dtypes differ, ContextError if the devices do."""
    first, *others = tensors
    dtype = first.array.dtype
    for other in others:
        if other.array.dtype != dtype:
            raise ShapeError(
                f"{operation}: dtypes {first.dtype} and {other.dtype} (of shapes {first.shape} and "
                f"{other.shape}) do not mix; convert one with ops.cast"
            )
        fit_device(operation, first, other)


def fit_device(operation: str, first: Tensor, other: Tensor) -> None:
    """Raise ContextError if two Tensors are on different devices."""
    if other.device is not first.device:
        raise ContextError(
            f"{operation}: one input is on {first.device.short} and one on "
            f"{other.device.short}; md.constant(x) copies a value to the current device"
        )


def floats(operation: str, value: TensorLike) -> Tensor:
    """Return a Tensor of floating point, of 16, 32 or 64 bits; raise ShapeError for another."""
    tensor = as_tensor(value)
    if tensor.dtype.char not in "fd" and not is_narrow(tensor.dtype):
        raise ShapeError(
            f"{operation}: dtype {tensor.dtype} (of shape {tensor.shape}) is not float32, float64, "
            f"float16 or bfloat16; convert it with ops.cast"
        )
    return tensor


def _is_number(value: Any) -> bool:
    """Whether it is a number of Python's or of NumPy's, to which bfloat16 does not count itself."""
    if isinstance(value, (int, float, np.number, np.bool_)):
        return True
    return isinstance(value, np.generic) and kind(value.dtype) == "f"


def _number(operation: str, number: Any, like: Tensor) -> Tensor:
    kinds = {"b": (bool, np.bool_), "i": (int, np.integer), "u": (int, np.integer)}
    allowed = kinds.get(kind(like.dtype))
    if allowed is not None and not isinstance(number, allowed):
        raise ShapeError(
            f"{operation}: the number {number!r} does not fit dtype {like.dtype} of shape "
            f"{like.shape}; convert the Tensor with ops.cast"
        )
    return Tensor(like.device.ops.full((), number, like.dtype), like.device)
