"""Combine: how the gradients of the replicas meet.

Every replica brings its gradients and, where batches are unequal, the number of examples behind
them. What comes out is one row of gradients for each place that applies them, and the factor that
makes a mean of it:

    equal counts      ((g0 + g1) + g2 …) · (1/n)
    unequal counts    Σ(c_i · g_i) · (1/Σ c_i)

The sum is left unscaled here; the optimizer multiplies by the factor in the pass in which it reads
the sum anyway, which gives the same bits.

Where all that replicas bring for a variable are IndexedSlices, so is the sum: their rows, added up
in replica order, which gives the bits of the sum of the whole gradients. Such a variable has no
bucket. Where only some are sparse, they are made dense.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidist.comm import Communicator, Row, allocate_row
from minidist.device import Array
from minidist.errors import MergeMismatchError, UsageError
from minidist.indexed_slices import IndexedSlices, concatenate
from minidist.structure import leaf
from minidist.tape import Gradient
from minidist.variable import Variable

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class Group:
    """Variables that are combined together, and the buckets for their combined gradients.

    A bucket is one buffer on one device that holds a gradient for each variable, each 64-byte
    aligned; it is made once and used in every step.
    """

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.variables = tuple(variables)
        for variable, times in Counter(variables).items():
            if times > 1:
                raise UsageError(
                    f"variable {variable.name!r} comes with {times} gradients; add them up first"
                )
        self.places = len(variables[0].copies)
        self.copies = [
            tuple(variable.copies[place] for variable in variables) for place in range(self.places)
        ]
        self._rows: list[list[Array]] | None = None
        self._parts: dict[tuple[int, ...], Group] = {}

    @property
    def names(self) -> list[str]:
        return [variable.name for variable in self.variables]

    def part(self, members: Sequence[int]) -> Group:
        """Return the group of only some of the variables; the same one whenever asked again."""
        key = tuple(members)
        part = self._parts.get(key)
        return part or self._parts.setdefault(key, Group([self.variables[i] for i in key]))

    @property
    def rows(self) -> list[list[Array]]:
        """For each place an array for each variable, on that copy's device."""
        if self._rows is None:
            self._rows = [self._row(place) for place in range(self.places)]
        return self._rows

    def _row(self, place: int) -> list[Array]:
        return allocate_row(
            [(copy.device, (copy.array.shape, copy.array.dtype)) for copy in self.copies[place]]
        )


@leaf
@dataclass(slots=True)
class Contribution:
    """What one replica brings: a gradient for each variable of the group (None: unused).

    `count` is how many examples are behind them, None where the replica does not say.
    """

    group: Group
    gradients: list[Gradient | None]
    count: int | None
    optimizer: Optimizer


@leaf
@dataclass(slots=True)
class Combined:
    """What comes out: for each place the gradients to apply, times `scale`.

    An IndexedSlices among them has each of its indices once.
    """

    group: Group
    rows: Sequence[Sequence[Gradient]]
    scale: float


class Nothing:
    """Replicas keep their own gradients: no meeting."""

    def combine(self, contribution: Contribution) -> Combined | None:
        """Return the replica's own gradients, or None where it has no example."""
        if contribution.count == 0:
            return None
        rows = [contribution.gradients] * contribution.group.places
        return Combined(contribution.group, rows, 1.0)


class MeetingOfAll(ABC):
    """All gradients are summed, to be scaled to the mean; a subclass says where the sum goes.

    `original` keeps the ancestors' factor and their disregard of counts: 1 (a sum), or 1/n.
    """

    def __init__(self, communicator: Communicator, *, original: str | None) -> None:
        self._communicator = communicator
        self._original = original

    def combine(self, contributions: Sequence[Contribution], threads: int) -> Combined | None:
        """Return the combined gradients, or None where no replica has an example."""
        group = contributions[0].group
        weights, scale = self._weights([contribution.count for contribution in contributions])
        if scale is None:
            return None
        sources = [contribution.gradients for contribution in contributions]
        if weights is not None:  # whoever has no example has no say, not even with a NaN
            sources = [row for row, weight in zip(sources, weights, strict=True) if weight]
            weights = [weight for weight in weights if weight]
        return Combined(group, self._sum_all(group, sources, weights, threads), scale)

    def _sum_all(
        self,
        group: Group,
        sources: Sequence[Sequence[Gradient | None]],
        weights: list[float] | None,
        threads: int,
    ) -> Sequence[Sequence[Gradient]]:
        """Return the sums for each place: whole ones in one pass, sparse ones one by one."""
        sparse = _sparse_columns(sources)
        if not sparse:
            return self._sum(group, [_whole(group, row) for row in sources], weights, threads)
        whole = [i for i in range(len(group.variables)) if i not in sparse]
        rows: list[list[Gradient]] = [[None] * len(group.variables) for _ in group.copies]
        if whole:
            chosen = [[row[i] for i in whole] for row in sources]
            sums = self._sum_all(group.part(whole), chosen, weights, threads)
            for row, arrays in zip(rows, sums, strict=True):
                for i, array in zip(whole, arrays, strict=True):
                    row[i] = array
        for i in sparse:
            total = _sum_rows([row[i] for row in sources], weights)
            for row, copies in zip(rows, group.copies, strict=True):
                row[i] = total.to(copies[i].device)
        return rows

    @abstractmethod
    def _sum(
        self, group: Group, sources: list[Row], weights: list[float] | None, threads: int
    ) -> Sequence[Row]:
        """Return for each place the sum of the sources, one row for each replica."""

    def _weights(self, counts: Sequence[int | None]) -> tuple[list[float] | None, float | None]:
        n = len(counts)
        known = [count for count in counts if count is not None]
        if known and len(known) < n:
            raise UsageError(
                f"some replicas gave a count and some did not: {list(counts)}; "
                "pass it in all or in none"
            )
        if known and sum(known) == 0:
            return None, None
        if self._original is not None:
            return None, 1.0 if self._original == "sum" else 1.0 / n
        if len(set(known)) <= 1:
            return None, 1.0 / n
        return [float(count) for count in known], 1.0 / sum(known)


class MeanAtVariable(MeetingOfAll):
    """The mean is formed where the one copy of the variable lives."""

    def _sum(
        self, group: Group, sources: list[Row], weights: list[float] | None, threads: int
    ) -> Sequence[Row]:
        self._communicator.reduce(sources, group.rows[0], weights, threads=threads)
        return group.rows


class AllReduce(MeetingOfAll):
    """Every replica gets the mean for its own copy; one that is alone has it already."""

    def _sum(
        self, group: Group, sources: list[Row], weights: list[float] | None, threads: int
    ) -> Sequence[Row]:
        if len(sources) == 1 and weights is None:
            return sources
        self._communicator.all_reduce(sources, group.rows, weights, threads=threads)
        return group.rows


def check_same(contributions: Sequence[Contribution]) -> None:
    """Raise MergeMismatchError where replicas come with different variables or optimizers."""
    group, optimizer = contributions[0].group, contributions[0].optimizer
    for replica, contribution in enumerate(contributions):
        if contribution.optimizer is not optimizer:
            raise MergeMismatchError(
                f"replicas 0 and {replica} apply gradients with different optimizers, "
                f"{optimizer!r} and {contribution.optimizer!r}; make one outside run and let all "
                "replicas use it"
            )
        if contribution.group is not group:
            raise MergeMismatchError(
                f"replicas 0 and {replica} apply gradients to different variables: {_some(group)} "
                f"and {_some(contribution.group)}; all replicas must pass the same, "
                "in the same order"
            )


def _some(group: Group) -> str:
    names = group.names
    return repr(names if len(names) <= 6 else [*names[:5], f"… {len(names)} in all"])


def _whole(group: Group, gradients: Sequence[Gradient | None]) -> Row:
    """Return a replica's gradients as arrays: zeros for what only other replicas have used."""
    row: list[Array] = []
    for gradient, copy in zip(gradients, group.copies[0], strict=True):
        if gradient is None:
            gradient = copy.device.ops.full(copy.array.shape, 0, copy.array.dtype)
        elif isinstance(gradient, IndexedSlices):
            gradient = gradient.to_dense().array
        row.append(gradient)
    return row


# --- sparse gradients ---------------------------------------------------------------------------


def _sparse_columns(sources: Sequence[Sequence[Gradient | None]]) -> list[int]:
    """Return for which variables all that there is are IndexedSlices."""
    some = {i for row in sources for i, part in enumerate(row) if isinstance(part, IndexedSlices)}
    return [
        i
        for i in sorted(some)
        if all(row[i] is None or isinstance(row[i], IndexedSlices) for row in sources)
    ]


def _sum_rows(
    parts: Sequence[IndexedSlices | None], weights: Sequence[float] | None
) -> IndexedSlices:
    """Return Σ w_i·x_i with each index once; each part has an index at most once."""
    if weights is not None:
        parts = [part if part is None else part * w for part, w in zip(parts, weights, strict=True)]
    there = [part for part in parts if part is not None]
    return there[0] if len(there) == 1 else concatenate(there).coalesced()
