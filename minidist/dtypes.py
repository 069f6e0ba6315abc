"""Element types: which are floating point, and how one becomes another.

Python's `np.dtype` knows no bfloat16; ml_dtypes adds it, as a type that NumPy takes for bytes
(kind "V"). So what asks for a kind or a dtype by name asks here. ml_dtypes is imported where
"bfloat16" is first named, and not before. float16 and bfloat16 are called *narrow*: they store
activations, and arithmetic on them is done in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]

_USER_DEFINED = 2  # what `dtype.isbuiltin` says of a type that another package has added


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return what np.dtype does, and for the name "bfloat16" that of ml_dtypes."""
    if isinstance(dtype, np.dtype):
        return dtype
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(dtype)
    return found


def kind(dtype: np.dtype[Any]) -> str:
    """Return NumPy's letter for the kind: "f" for bfloat16 too, but not for the 8-bit floats."""
    if dtype.isbuiltin == _USER_DEFINED:
        return "f" if dtype.name == "bfloat16" else "V"
    return dtype.kind


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16, which are computed with in float32."""
    return dtype.itemsize == 2 and kind(dtype) == "f"


def as_array(value: Any, dtype: Any = None) -> HostArray:
    """Return what np.asarray does; to float16 and bfloat16 everything is rounded once.

    That is to the nearest, of two the even one; too large is infinite, without a warning.
    """
    if dtype is None or not is_narrow(wanted := as_dtype(dtype)):
        return np.asarray(value, None if dtype is None else as_dtype(dtype))
    array = np.asarray(value)
    if wanted.kind == "V" and not (kind(array.dtype) == "f" and array.dtype.itemsize <= 4):
        array = _to_odd(array.astype(np.float64, copy=False))
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(wanted, copy=False)


def _to_odd(array: HostArray) -> HostArray:
    """Return float64 as float32 such that rounding this again is as rounding `array` once.

    ml_dtypes goes from float64 to bfloat16 by way of float32, and so rounds twice. Here what
    float32 cannot hold becomes the neighbour whose last bit is 1: it stays on the side of each
    halfway point of the narrow type where it was (Boldo and Melquiond, 2008).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = np.array(array, np.float32)
    bits = nearest.view(np.int32)
    even = (nearest != array) & (bits & 1 == 0) & np.isfinite(nearest)
    bits[even] += np.where(np.abs(nearest[even]) < np.abs(array[even]), 1, -1).astype(np.int32)
    return nearest
