"""Reduction: one value from what the replicas have, leaf by leaf, in replica order.

A sum is ((x0 + x1) + x2 …); a mean is that times 1/n. Over an axis too, every replica's component
is summed over it first, and the mean is over all elements of all replicas: never a mean of means.
Everything that goes to the same devices is summed in one pass.

Of several workers each brings what its replicas have, and all get the result.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist import dtypes, indexed_slices, ops
from minidist.comm import Communicator, Row, allocate_row
from minidist.comm.sharing import share
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
from minidist.parts import NOT, NUMBER, PERHAPS, SPARSE, SURELY, Part, meet, parts_of
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
    *details: str,
) -> list[Any]:
    """Return the sum or mean of each value, in order; see Strategy.batch_reduce.

    details: what else several workers must do alike, in words.
    """
    return _Reduction(strategy, communicator, as_reduce_op(op), None)(list(pairs), *details)


@dataclass
class _Leaf:
    """A leaf, what each replica has of it, and where the result is wanted.

    same: one value for all replicas, so that one part stands for all; SURELY or PERHAPS as long as
    other workers have not been asked, NOT where they differ.
    """

    value: Any
    wanted: Devices | None
    home: Devices
    same: int
    parts: Sequence[Part]

    @property
    def devices(self) -> Devices:
        return self.wanted or self.home


@dataclass
class _Term:
    """A leaf of which the replicas' tensors are to be summed.

    parts: those of this process. scale: the factor of the sum, taken in the same pass. after: that
    of an integer sum, which is made floating point first. dtype: what the sum is rounded to at the
    end, if not its own.
    """

    parts: Sequence[Tensor]
    scale: float = 1.0
    after: float | None = None
    dtype: Any = None


class _Reduction:
    """One call of reduce or batch_reduce: first every leaf is looked at, then all are summed.

    In between several workers tell each other what they have, so that all do the same with it.
    """

    def __init__(
        self, strategy: Strategy, communicator: Communicator, op: ReduceOp, axis: int | None
    ) -> None:
        self._strategy = strategy
        self._communicator = communicator
        self._op = op
        self._axis = axis
        self._site = strategy.site

    def __call__(self, pairs: Sequence[tuple[Any, Any]], *details: str) -> list[Any]:
        leaves: list[_Leaf] = []
        for value, destinations in pairs:
            wanted = None if destinations is None else devices_of(destinations)
            leaves += [self._look(leaf, wanted) for leaf in _leaves(value)]
        if self._site.peers.count > 1:
            self._ask(leaves, details)
        results: list[Any] = [None] * len(leaves)
        # What is summed in one pass: to the same devices, of as many parts, and with one factor.
        passes: dict[tuple[Devices, int, float], list[tuple[int, _Term]]] = {}
        for i, leaf in enumerate(leaves):
            outcome = self._settled(leaf)
            if isinstance(outcome, _Term):
                devices = self._meeting_place(leaf)
                key = (devices, len(outcome.parts), outcome.scale)
                passes.setdefault(key, []).append((i, outcome))
            else:
                results[i] = outcome
        for (devices, _, scale), members in passes.items():
            totals = self._sum([term for _, term in members], devices, scale)
            for (i, _), total in zip(members, totals, strict=True):
                there = leaves[i].devices
                results[i] = total if there == devices else broadcast(total, there)
        following = iter(results)
        return [map_leaves(lambda _: next(following), value) for value, _ in pairs]

    # --- what a leaf is

    def _look(self, leaf: Any, wanted: Devices | None) -> _Leaf:
        same, values, home = self._components(leaf)
        if same:
            values = values[:1]
        placeable = [
            value
            if isinstance(value, Tensor | IndexedSlices) or is_number(value)
            else as_placeable(value, f"reduce, in replica {self._site.first + i}")
            for i, value in enumerate(values)
        ]
        return _Leaf(leaf, wanted, home, same, parts_of(placeable, self._axis))

    def _components(self, leaf: Any) -> tuple[int, Sequence[Any], Devices]:
        """Return whether a leaf is one for all replicas, its components, and their devices."""
        if isinstance(leaf, Variable):
            different = differs(leaf) and self._site.replicas > 1
            same = NOT if different else SURELY
            return same, [copy.tensor for copy in leaf.copies], devices_of(leaf)
        if isinstance(leaf, DistributedValues):
            n = len(self._strategy.devices)
            if isinstance(leaf, PerReplica) and len(leaf.values) != n:
                raise UsageError(
                    f"reduce: a PerReplica with {len(leaf.values)} components is none of the "
                    f"{n} replicas of {self._strategy!r}: {leaf!r}"
                )
            home = leaf.devices or self._strategy.devices[: len(leaf.values)]
            same = NOT if isinstance(leaf, PerReplica) else PERHAPS
            return same, leaf.values, tuple(home)
        if isinstance(leaf, Tensor | IndexedSlices):
            return PERHAPS, [leaf], (leaf.device,)
        return PERHAPS, [leaf], self._strategy.devices[:1]

    def _ask(self, leaves: Sequence[_Leaf], details: Sequence[str]) -> None:
        """Put the parts of all workers into leaves."""
        how = [f"the {self._op.value} over axis {self._axis}", *details]
        looked = [(leaf.same, leaf.parts) for leaf in leaves]
        found = meet(self._site.peers, self._site.counts, how, looked)
        for leaf, (same, parts) in zip(leaves, found, strict=True):
            leaf.same, leaf.parts = SURELY if same else NOT, parts

    def _settled(self, leaf: _Leaf) -> Any:
        """Return a leaf's result, or the term that it is to be summed as."""
        parts, devices, replicas = leaf.parts, leaf.devices, self._site.replicas
        if leaf.same:
            value = parts[0].value if len(parts) == 1 else None
            zero = isinstance(leaf.value, int | float) and leaf.value == 0
            if self._op is ReduceOp.SUM and replicas > 1 and not zero:
                raise UsageError(
                    f"reduce: {leaf.value!r} is the same in all {replicas} replicas and no "
                    "per-replica value, so its sum is not defined; reduce a per-replica value, or "
                    "use 'mean'"
                )
            if self._unchanged(value):
                return leaf.value if leaf.wanted is None else broadcast(leaf.value, leaf.wanted)
        kinds = {part.kind for part in parts}
        if kinds == {NUMBER}:
            return self._number([part.value for part in parts])
        if NUMBER in kinds:
            replica = next(i for i, part in enumerate(parts) if part.kind == NUMBER)
            raise ShapeError(
                f"reduce: replica {replica} has the number {parts[replica].value!r} and others "
                "have tensors; make it one too, with md.constant"
            )
        if kinds == {SPARSE}:
            return self._sparse(parts, devices)
        return self._dense([part.made_dense() for part in parts], devices)

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
        total = values[0]
        for value in values[1:]:
            total = total + value
        if self._op is ReduceOp.MEAN:
            return total / len(values)
        return int(total) if isinstance(total, bool) else total

    def _sparse(self, parts: Sequence[Part], devices: Devices) -> Any:
        slices = [part.value for part in parts]
        if None in slices:
            slices = self._slices_of_all(parts)
        total = indexed_slices.concatenate(slices)
        if self._op is ReduceOp.MEAN and len(parts) > 1:
            total = total * (1 / len(parts))
        return place(total, devices)

    def _slices_of_all(self, parts: Sequence[Part]) -> list[IndexedSlices]:
        """Return those of all workers, on this one's first device."""
        arrays = []
        for part in self._own(parts):
            arrays += [part.value.values.numpy(), part.value.indices.numpy()]
        _, theirs = share(self._site.peers, "reduce IndexedSlices", arrays, kind="rows")
        device = self._strategy.devices[0]
        given = (Tensor(device.copy_in(array), device) for each in theirs for array in each)
        return [IndexedSlices(next(given), next(given), part.shape) for part in parts]

    # --- leaves that are summed

    def _own(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return those of this process; of what is the same in all replicas, the only one."""
        return parts[self._site.first :][: len(self._strategy.devices)] if len(parts) > 1 else parts

    def _dense(self, parts: Sequence[Part], devices: Devices) -> Any:
        first = parts[0]
        for replica, part in enumerate(parts[1:], 1):
            if part.shape != first.shape or part.dtype != first.dtype:
                raise ShapeError(f"reduce: replica 0 has {first} and replica {replica} has {part}")
        own = [part.value for part in self._own(parts)]
        count = sum(part.length for part in parts)
        factor = 1.0 if self._op is ReduceOp.SUM else 1 / count if count else 0.0
        after = factor if self._op is ReduceOp.MEAN and own[0].dtype.kind in "iu" else None
        narrow = first.narrow
        if len(parts) > 1:
            return _Term(own, factor if after is None else 1.0, after, narrow)
        only = ops.cast(own[0], "float64") if after is not None else own[0]
        total = only if factor == 1 else only * factor
        return place(total if narrow is None else ops.cast(total, narrow), devices)

    def _meeting_place(self, leaf: _Leaf) -> Devices:
        """Return where a leaf is summed; workers may differ in where they want what is summed."""
        return leaf.devices if self._site.peers.count == 1 else self._strategy.devices[:1]

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
