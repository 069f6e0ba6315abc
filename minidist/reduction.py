"""Reduction: one value from what the replicas have, leaf by leaf, in replica order.

A sum is ((x0 + x1) + x2 …); a mean is that times 1/n. Over an axis too, every replica's component
is summed over it first, and the mean is over all elements of all replicas: never a mean of means.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from minidist import ops
from minidist.device import host
from minidist.errors import ShapeError, UsageError
from minidist.tensor import Tensor, to_device
from minidist.values import DistributedValues

OPS = ("sum", "mean")


def reduce(op: str, value: Any, axis: int | None, replicas: int) -> Any:
    """Return the sum or mean of each leaf of a structure; see Strategy.reduce."""
    name = str(op).lower()
    if name not in OPS:
        raise UsageError(f"reduce knows {' and '.join(map(repr, OPS))}, not {op!r}")
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise TypeError(f"reduce: axis must be an int or None, not {axis!r}")
    return optree.tree_map(
        lambda leaf: _reduce(name, _parts(name, leaf, replicas), axis), value, none_is_leaf=True
    )


def _parts(op: str, leaf: Any, replicas: int) -> Sequence[Any]:
    """Return the components of a leaf as Tensors or Python numbers, all of one shape and dtype."""
    if isinstance(leaf, DistributedValues):
        parts: Sequence[Any] = leaf.values
    elif op == "sum" and replicas > 1 and not _is_zero(leaf):
        raise UsageError(
            f"reduce: {leaf!r} is the same in all {replicas} replicas and no distributed value, so "
            "its sum is not defined; reduce a per-replica value, or use 'mean'"
        )
    else:
        parts = [leaf]
    return [_summable(part, replica) for replica, part in enumerate(parts)]


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and leaf == 0


def _summable(part: Any, replica: int) -> Any:
    """Return what can be added up: booleans count as 0 and 1."""
    if isinstance(part, Tensor):
        return ops.cast(part, "int64") if part.dtype.kind == "b" else part
    if isinstance(part, numbers.Number) and not isinstance(part, np.generic):
        return int(part) if isinstance(part, bool) else part
    array = np.asarray(part)
    if array.dtype.kind not in "biuf":
        raise UsageError(
            f"reduce: {part!r} of replica {replica} is not a number or array of numbers"
        )
    return _summable(Tensor(host().copy_in(array), host()), replica)


def _reduce(op: str, parts: Sequence[Any], axis: int | None) -> Any:
    counts = [1] * len(parts)
    if axis is not None:
        parts, counts = _over_axis(parts, axis)
    total = parts[0]
    for replica, part in enumerate(parts[1:], 1):
        if _kind(part) != _kind(total):
            raise ShapeError(
                f"reduce: replica 0 has {_kind(total)} and replica {replica} has {_kind(part)}"
            )
        total = total + (to_device(part, total.device) if isinstance(part, Tensor) else part)
    if op == "sum":
        return total
    if isinstance(total, Tensor) and total.dtype.kind in "iu":
        total = ops.cast(total, "float64")
    count = sum(counts)
    if not isinstance(total, Tensor):
        return total / count
    return total * (1 / count if count else 0.0)


def _kind(part: Any) -> str:
    return f"{part.dtype}{list(part.shape)}" if isinstance(part, Tensor) else "a number"


def _over_axis(parts: Sequence[Any], axis: int) -> tuple[list[Tensor], list[int]]:
    """Return each component's sum over an axis, and how many elements that were."""
    for part in parts:
        if not isinstance(part, Tensor) or not -part.ndim <= axis < part.ndim:
            shape = list(part.shape) if isinstance(part, Tensor) else []
            raise UsageError(f"reduce: axis {axis} is out of range for a value of shape {shape}")
    return [ops.reduce_sum(part, axis) for part in parts], [part.shape[axis] for part in parts]
