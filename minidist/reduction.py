"""Reduction: one value from what the replicas have, leaf by leaf, in replica order.

A sum is ((x0 + x1) + x2 …); a mean is that times 1/n. Over an axis too, every replica's component
is summed over it first, and the mean is over all elements of all replicas: never a mean of means.
Everything that goes to the same devices is summed in one pass.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist import dtypes, indexed_slices, ops
from minidist.comm import Communicator, Row, allocate_row
from minidist.destinations import (
    as_placeable,
    broadcast,
    devices_of,
    is_number,
    mirrored,
    place,
)
from minidist.device import Device
from minidist.errors import ShapeError, UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.structure import map_leaves
from minidist.sync_on_read import SyncOnReadVariable
from minidist.tensor import Tensor
from minidist.threads import cores
from minidist.values import DistributedValues, PerReplica
from minidist.variable import Variable

if TYPE_CHECKING:
    from minidist.strategy import Strategy

Devices = tuple[Device, ...]


class ReduceOp(enum.Enum):
    """What becomes of the replicas' values; "sum" and "mean", in any case, say the same."""

    SUM = "sum"
    MEAN = "mean"


_BY_NAME = {op.value: op for op in ReduceOp}


def as_reduce_op(op: ReduceOp | str) -> ReduceOp:
    """Return the operation of that name; raises UsageError for one there is not."""
    if isinstance(op, str):
        op = _BY_NAME.get(op.lower(), op)
    if isinstance(op, ReduceOp):
        return op
    raise UsageError(f"reduce knows ReduceOp.SUM and MEAN, or 'sum' and 'mean', not {op!r}")


def differs(variable: Variable) -> bool:
    """Whether each copy of a variable is a replica's own, so that they may differ."""
    own: bool = variable.strategy.variable_mgr.independent
    return own or isinstance(variable, SyncOnReadVariable)


def reduce(
    strategy: Strategy,
    communicator: Communicator,
    op: ReduceOp | str,
    value: Any,
    axis: int | None,
    destinations: Any,
) -> Any:
    """Return the sum or mean of each leaf of a structure; see Strategy.reduce."""
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise TypeError(f"reduce: axis must be an int or None, not {axis!r}")
    return _Reduction(strategy, communicator, as_reduce_op(op), axis)([(value, destinations)])[0]


def batch_reduce(
    strategy: Strategy,
    communicator: Communicator,
    op: ReduceOp | str,
    pairs: Iterable[tuple[Any, Any]],
) -> list[Any]:
    """Return the sum or mean of each value, in order; see Strategy.batch_reduce."""
    return _Reduction(strategy, communicator, as_reduce_op(op), None)(list(pairs))


@dataclass
class _Term:
    """A leaf of which the replicas' tensors are to be summed.

    scale: the factor of the sum, taken in the same pass. after: that of an integer sum, which is
    made floating point first. dtype: what the sum is rounded to at the end, if not its own.
    """

    parts: Sequence[Tensor]
    scale: float = 1.0
    after: float | None = None
    dtype: Any = None


class _Reduction:
    """One call of reduce or batch_reduce: first every leaf is looked at, then all are summed."""

    def __init__(
        self, strategy: Strategy, communicator: Communicator, op: ReduceOp, axis: int | None
    ) -> None:
        self._strategy = strategy
        self._communicator = communicator
        self._op = op
        self._axis = axis

    def __call__(self, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        # What is summed in one pass: to the same devices, of as many parts, and with one factor.
        passes: dict[tuple[Devices, int, float], list[tuple[list[Any], int, _Term]]] = {}
        results = []
        for value, destinations in pairs:
            wanted = None if destinations is None else devices_of(destinations)
            leaves = _leaves(value)
            results.append(leaves)
            for i, leaf in enumerate(leaves):
                outcome, devices = self._look(leaf, wanted)
                if isinstance(outcome, _Term):
                    key = (devices, len(outcome.parts), outcome.scale)
                    passes.setdefault(key, []).append((leaves, i, outcome))
                else:
                    leaves[i] = outcome
        for (devices, _, scale), members in passes.items():
            totals = self._sum([term for _, _, term in members], devices, scale)
            for (leaves, i, _), total in zip(members, totals, strict=True):
                leaves[i] = total
        return [
            _with_leaves(value, leaves) for (value, _), leaves in zip(pairs, results, strict=True)
        ]

    # --- what a leaf is

    def _look(self, leaf: Any, wanted: Devices | None) -> tuple[Any, Devices]:
        """Return a leaf's result, or the term that it is to be summed as, and its devices."""
        replicas = self._strategy.num_replicas
        different, values, home = self._components(leaf)
        devices = wanted or home
        if not different:
            zero = isinstance(leaf, int | float) and leaf == 0
            if self._op is ReduceOp.SUM and replicas > 1 and not zero:
                raise UsageError(
                    f"reduce: {leaf!r} is the same in all {replicas} replicas and no per-replica "
                    "value, so its sum is not defined; reduce a per-replica value, or use 'mean'"
                )
            if self._unchanged(values[0]):
                return leaf if wanted is None else broadcast(leaf, wanted), devices
            values = values[:1]
        if not all(isinstance(value, Tensor) for value in values):
            if all(map(is_number, values)):
                return self._number(values), devices
            parts = [
                as_placeable(value, f"reduce, in replica {replica}")
                for replica, value in enumerate(values)
            ]
            for replica, value in enumerate(values):
                if is_number(value):
                    raise ShapeError(
                        f"reduce: replica {replica} has the number {value!r} and others have "
                        "tensors; make it one too, with md.constant"
                    )
            sparse = [part for part in parts if isinstance(part, IndexedSlices)]
            if len(sparse) == len(parts) and self._axis is None:
                return self._sparse(sparse, devices), devices
            values = [p.to_dense() if isinstance(p, IndexedSlices) else p for p in parts]
        return self._dense(values, devices)

    def _components(self, leaf: Any) -> tuple[bool, Sequence[Any], Devices]:
        """Return whether a leaf differs between replicas, its components, and their devices."""
        if isinstance(leaf, Variable):
            different = differs(leaf) and len(leaf.copies) > 1
            return different, [copy.tensor for copy in leaf.copies], devices_of(leaf)
        if isinstance(leaf, DistributedValues):
            if isinstance(leaf, PerReplica) and len(leaf.values) != self._strategy.num_replicas:
                raise UsageError(
                    f"reduce: a PerReplica with {len(leaf.values)} components is none of the "
                    f"{self._strategy.num_replicas} replicas of {self._strategy!r}: {leaf!r}"
                )
            home = leaf.devices or self._strategy.devices[: len(leaf.values)]
            return isinstance(leaf, PerReplica), leaf.values, tuple(home)
        if isinstance(leaf, Tensor | IndexedSlices):
            return False, [leaf], (leaf.device,)
        return False, [leaf], self._strategy.devices[:1]

    def _unchanged(self, value: Any) -> bool:
        """Whether one value is its own result, with nothing to be done to it."""
        kinds = "f" if self._op is ReduceOp.MEAN else "fiu"
        return (
            self._axis is None
            and isinstance(value, Tensor | IndexedSlices)
            and dtypes.kind(value.dtype) in kinds
        )

    # --- leaves that are done at once

    def _number(self, values: Sequence[Any]) -> Any:
        if self._axis is not None:
            raise UsageError(f"reduce: axis {self._axis} is out of range for a number: {values!r}")
        total = values[0]
        for value in values[1:]:
            total = total + value
        if self._op is ReduceOp.MEAN:
            return total / len(values)
        return int(total) if isinstance(total, bool) else total

    def _sparse(self, parts: Sequence[IndexedSlices], devices: Devices) -> Any:
        total = indexed_slices.concatenate(parts)
        if self._op is ReduceOp.MEAN and len(parts) > 1:
            total = total * (1 / len(parts))
        return place(total, devices)

    # --- leaves that are summed

    def _dense(self, parts: Sequence[Tensor], devices: Devices) -> tuple[Any, Devices]:
        counts = [1] * len(parts)
        if all(part.dtype == bool for part in parts):  # they count as 0 and 1
            parts = [ops.cast(part, "int64") for part in parts]
        narrow = None
        if self._axis is not None:
            if all(dtypes.is_narrow(part.dtype) and part.dtype == parts[0].dtype for part in parts):
                narrow = parts[0].dtype  # and float32 until all is added up
                parts = [ops.cast(part, "float32") for part in parts]
            counts = [_length(part, self._axis) for part in parts]
            parts = [ops.reduce_sum(part, self._axis) for part in parts]
        shape, dtype = parts[0].shape, parts[0].dtype
        for replica, part in enumerate(parts[1:], 1):
            if part.shape != shape or part.dtype != dtype:
                raise ShapeError(
                    f"reduce: replica 0 has {dtype}{list(shape)} and replica {replica} has "
                    f"{part.dtype}{list(part.shape)}"
                )
        count = sum(counts)
        factor = 1.0 if self._op is ReduceOp.SUM else 1 / count if count else 0.0
        after = factor if self._op is ReduceOp.MEAN and dtype.kind in "iu" else None
        if len(parts) > 1:
            return _Term(parts, factor if after is None else 1.0, after, narrow), devices
        only = ops.cast(parts[0], "float64") if after is not None else parts[0]
        total = only if factor == 1 else only * factor
        return place(total if narrow is None else ops.cast(total, narrow), devices), devices

    def _sum(self, terms: Sequence[_Term], devices: Devices, scale: float) -> Iterator[Any]:
        """Sum all terms in one pass, to all devices."""
        kinds = [(term.parts[0].shape, term.parts[0].dtype) for term in terms]
        sources = [
            Row([part.array for part in parts], [part.device for part in parts])
            for parts in zip(*[term.parts for term in terms], strict=True)
        ]
        rows = [allocate_row([(device, kind) for kind in kinds]) for device in devices]
        self._communicator.all_reduce(sources, rows, scale=scale, threads=cores())
        for term, arrays in zip(terms, zip(*rows, strict=True), strict=True):
            totals = [Tensor(array, d) for array, d in zip(arrays, devices, strict=True)]
            if term.after is not None:
                totals = [ops.cast(total, "float64") * term.after for total in totals]
            if term.dtype is not None:
                totals = [ops.cast(total, term.dtype) for total in totals]
            yield mirrored(totals, devices)


def _leaves(structure: Any) -> list[Any]:
    """Return the leaves of a structure in the order in which map_leaves comes to them."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_leaves(note, structure)
    return leaves


def _with_leaves(structure: Any, leaves: Sequence[Any]) -> Any:
    following = iter(leaves)
    return map_leaves(lambda _: next(following), structure)


def _length(part: Tensor, axis: int) -> int:
    if not -part.ndim <= axis < part.ndim:
        raise UsageError(
            f"reduce: axis {axis} is out of range for a value of shape {list(part.shape)}"
        )
    return part.shape[axis]
