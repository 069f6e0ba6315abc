"""Values whose sums are exact in any order, so that a result is right or wrong to the bit.

All are whole numbers, and so small that every partial sum of them is one that the type can hold:
with p significant bits (float32 has 24) and terms of a total weight W, numbers of at most 2^p / W.
They use most of the bits there are, so a sum that went through a narrower type is wrong. Integers
are of the type's whole range: they wrap around, which is exact too.

What a replica brings is a function of its number, the round and the element, by Philox, so every
rank can say what all the others have brought.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidist.dtypes import HostArray, as_dtype, is_narrow, kind
from minidist.errors import UsageError
from minidist.kernels.layer import uniform

DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
)
OPS = ("sum", "mean", "weighted")
KEY = (0x636F6D6D, 0x62656E63)
WHOLE = 1 << 52  # integers of 64 bits are drawn from -WHOLE to WHOLE: draws have no more bits


def weights(op: str, replicas: int) -> list[float] | None:
    """Return with which weight each replica counts under an op, None where all count once."""
    return [1.0 + replica % 3 for replica in range(replicas)] if op == "weighted" else None


def scale(op: str, replicas: int) -> float:
    """Return what an op multiplies the sum with, once."""
    if op == "sum":
        return 1.0
    return 1.0 / sum(weights(op, replicas) or [1.0] * replicas)


def brought(dtype: Any, size: int, op: str, replicas: int, replica: int, round_: int) -> HostArray:
    """Return the `size` elements that a replica brings in a round.

    Raises UsageError where there are more replicas than the dtype has exact sums of.
    """
    dtype = as_dtype(dtype)
    least, most = _range(dtype, sum(weights(op, replicas) or [1.0] * replicas))
    draws: HostArray = np.empty(size, np.float64)
    uniform(draws, KEY, (round_, replica, 0))
    np.floor(draws * (float(most) - least + 1), out=draws)
    draws += least
    return draws.astype(dtype)


def result(dtype: Any, size: int, op: str, replicas: int, round_: int) -> HostArray:
    """Return what the sum over all replicas must be: exact, times the scale, rounded once.

    float16 and bfloat16 are added up and scaled in float32.
    """
    dtype = as_dtype(dtype)
    wide = np.dtype(np.float32) if is_narrow(dtype) else dtype
    total = np.zeros(size, wide)
    counted = weights(op, replicas)
    for replica in range(replicas):
        term = brought(dtype, size, op, replicas, replica, round_).astype(wide, copy=False)
        total += term if counted is None else term * wide.type(counted[replica])
    if op != "sum":
        total *= wide.type(scale(op, replicas))
    return total.astype(dtype, copy=False)


def spoiled(shape: tuple[int, ...], dtype: Any) -> HostArray:
    """Return what no right result holds in all elements, so that who does not write is wrong."""
    dtype = as_dtype(dtype)
    return np.full(shape, np.nan if kind(dtype) == "f" else 85, dtype)


def wrong(array: HostArray, right: HostArray) -> int:
    """Return how many elements are not what they must be."""
    return int(np.count_nonzero(array != right))


def _range(dtype: np.dtype[Any], total_weight: float) -> tuple[int, int]:
    """Return the least and the most that a replica may bring."""
    if kind(dtype) != "f":
        limits = np.iinfo(dtype)
        return max(int(limits.min), -WHOLE), min(int(limits.max), WHOLE)
    most = int(2 ** _significant_bits(dtype) // total_weight)
    if most < 1:
        raise UsageError(
            f"--datatype={dtype.name} has exact sums of at most {2 ** _significant_bits(dtype)} "
            f"terms, and the replicas' weights add up to {total_weight:g}; take float32"
        )
    return -most, most


def _significant_bits(dtype: np.dtype[Any]) -> int:
    if dtype.name == "bfloat16":
        return 8
    return int(np.finfo(dtype).nmant) + 1
