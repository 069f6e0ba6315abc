"""Padding: inputs that differ in length get one shape in all replicas, and keep their true sizes.

    results = strategy.run(fn, md.pad(batch))

In `fn` a padded input is a Padded. What it computes is as if there were no padding, with

    ops.reduce_sum(x.value * x.mask()) / x.elements     # the mean, the zeros not counted
    ops.reduce_mean(x.unpadded())                       # or on the true part alone

as long as it asks for one of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist import context
from minidist.device import Device
from minidist.dtypes import as_dtype
from minidist.errors import ContextError, ShapeError, StructureError, UsageError
from minidist.regrouping import line_up, regroup
from minidist.structure import describe, fill, leaves, node
from minidist.tensor import Tensor
from minidist.values import DistributedValues, select_replica


class Padded(NamedTuple):
    """A Tensor with zeros at the end of some of its dimensions, and its sizes without them."""

    value: Tensor
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of true elements."""
        return math.prod(self.sizes)

    def mask(self, dtype: Any = None) -> Tensor:
        """Return 1 for each true element and 0 for the others, in `dtype` or that of the value.

        Its shape goes with the value's: a dimension that was not padded has length 1.
        """
        value = self.value
        shape = [
            1 if size == padded else padded
            for size, padded in zip(self.sizes, value.shape, strict=True)
        ]
        array = np.zeros(shape, value.dtype if dtype is None else as_dtype(dtype))
        array[tuple(slice(size) for size in self.sizes)] = 1
        return Tensor(value.device.copy_in(array), value.device)

    def unpadded(self) -> Tensor:
        """Return the true part."""
        return self.value[tuple(slice(size) for size in self.sizes)]


def pad(
    x: Any,
    maximum: Any = None,
    *,
    axis: int | Sequence[int] | None = None,
    power_of_two: bool = False,
) -> Any:
    """Pad arrays that differ in size between replicas; return `x` with a Padded for each of them.

    x: a structure of PerReplica arrays, or of arrays that all replicas share.
    axis: the dimensions that may differ, all by default; the others must be the same in all
        replicas. What has none of them (numbers, arrays of a lower rank) stays as it is.
    maximum: the sizes to pad to, a sequence for each leaf of `x`, with None where a size is to be
        the largest of all replicas. A number is the size of the first dimension in `axis`.
    power_of_two: where no maximum is given pad to the next power of two, so that few different
        shapes occur, and where one is given to the smaller of the two.

    The replicas are those of this process: where those of several workers are to have one shape,
    give a maximum.

    A replica gets a Padded of its own part and the part's true sizes. A part that needs no padding
    is the very Tensor that `x` has.

    Raises StructureError (a ValueError) where the structures of the replicas or of `maximum`
    differ; ShapeError (a ValueError) where the replicas' ranks or dtypes differ, or a dimension
    that is not in `axis`, or where a size is above its maximum; ContextError (a RuntimeError) in a
    replica, which knows its own part only.
    """
    if context.has_strategy() and context.get_replica_context() is not None:
        raise ContextError(
            f"pad was called in {context.describe()}, which knows its own part only; call it "
            "outside run, as in strategy.run(fn, md.pad(x))"
        )
    distributed = [leaf for leaf in leaves(x) if isinstance(leaf, DistributedValues)]
    counts = {len(leaf.values) for leaf in distributed} or {1}
    if len(counts) > 1:
        raise UsageError(f"pad: the values are for different numbers of replicas, {counts}")
    replicas = max(counts)
    devices = (distributed[0].devices if distributed else None) or [context.device()] * replicas
    try:
        inputs = line_up([select_replica(replica, x) for replica in range(replicas)])
    except StructureError as error:
        raise StructureError(f"pad: the replicas have different inputs: {error}") from None
    padded = []
    for leaf, most in zip(leaves(inputs), _maxima(inputs, maximum), strict=True):
        shape = _shape(leaf.values, most, axis, power_of_two)
        new = leaf.values if shape is None else _pad(leaf.values, shape, devices)
        padded.append(regroup(new, devices=devices if distributed else None))
    return fill(inputs, padded)


def _maxima(inputs: Any, maximum: Any) -> list[Any]:
    """Return the maximum of each leaf."""
    own = node(type(inputs))
    if own is None:
        return [maximum]
    names, parts, _ = own.open(inputs)
    if maximum is None or isinstance(maximum, int):
        below = [maximum] * len(parts)
    else:
        theirs = node(type(maximum))
        given = dict(zip(*theirs.open(maximum)[:2], strict=True)) if theirs else {}
        if given.keys() != set(names):
            raise StructureError(
                f"pad: maximum must have the structure of the inputs, {describe(inputs)}, but it "
                f"is {describe(maximum)}"
            )
        below = [given[name] for name in names]
    return [most for part, limit in zip(parts, below, strict=True) for most in _maxima(part, limit)]


def _shape(
    parts: Sequence[Any], maximum: Any, axis: int | Sequence[int] | None, power_of_two: bool
) -> tuple[int, ...] | None:
    """Return the shape that the parts of one input are padded to; None for what stays as it is."""
    if not any(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return None
    kinds = [
        f"{part.dtype} of rank {part.ndim}" if hasattr(part, "ndim") else repr(part)
        for part in parts
    ]
    if len(set(kinds)) > 1:
        raise ShapeError(
            "pad: an input must have the same rank and dtype in all replicas, but is "
            + ", ".join(kinds)
        )
    rank = parts[0].ndim
    axes = range(rank) if axis is None else [axis] if isinstance(axis, int) else axis
    dynamic = sorted({a % rank for a in axes if -rank <= a < rank})
    if isinstance(maximum, int):
        maximum = [maximum if dynamic[:1] == [a] else None for a in range(rank)]
    elif maximum is not None and len(maximum) != rank:
        raise ShapeError(f"pad: maximum {maximum!r} is not one size for each of {rank} dimensions")
    shape = []
    for a, most in enumerate(maximum or [None] * rank):
        sizes = [part.shape[a] for part in parts]
        if a not in dynamic and {*sizes, sizes[0] if most is None else most} != {sizes[0]}:
            raise ShapeError(
                f"pad: dimension {a}, of sizes {sizes} and maximum {most}, is not in axis={axis}, "
                "so it must be the same everywhere; add it to axis"
            )
        if most is not None and max(sizes) > most:
            raise ShapeError(
                f"pad: dimension {a} has sizes {sizes} in the replicas, above the maximum {most}"
            )
        shape.append(_size(max(sizes), most, power_of_two and a in dynamic))
    return tuple(shape) if dynamic else None


def _size(longest: int, maximum: int | None, power_of_two: bool) -> int:
    """Return what a dimension is padded to."""
    if power_of_two:
        power = 1 << (longest - 1).bit_length() if longest else 0
        return power if maximum is None else min(power, maximum)
    return longest if maximum is None else maximum


def _pad(parts: Sequence[Any], shape: tuple[int, ...], devices: Sequence[Device]) -> list[Padded]:
    """Return the Padded of each replica; what several of them share is padded once."""
    done: dict[tuple[int, Device], Padded] = {}
    padded = []
    for part, own in zip(parts, devices, strict=True):
        device = part.device if isinstance(part, Tensor) else own
        key = id(part), device
        if key not in done:
            value = part if isinstance(part, Tensor) else Tensor(device.copy_in(part), device)
            if value.shape != shape:
                corner = tuple(slice(size) for size in value.shape)
                value = Tensor(device.ops.put(value.array, corner, shape), device)
            done[key] = Padded(value, tuple(part.shape))
        padded.append(done[key])
    return padded
