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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minidist import context, observe
from minidist.comm import Communicator, Row
from minidist.device import Device, Event
from minidist.errors import MergeMismatchError, UsageError
from minidist.indexed_slices import IndexedSlices, concatenate
from minidist.patience import DEADLINE
from minidist.structure import leaf
from minidist.tape import Gradient
from minidist.traffic import Outline, Traffic
from minidist.variable import Variable
from minidist.variable_mgr.group import Group
from minidist.variable_mgr.held import Held

if TYPE_CHECKING:
    from minidist.optim import Optimizer
    from minidist.variable_mgr.overlap import Filling


@leaf
@dataclass(slots=True)
class Contribution:
    """What one replica brings: a gradient for each variable of the group (None: unused).

    count: how many examples are behind them, None where the replica does not say.
    scale: what they are yet to be multiplied by, the same in all replicas: 1/loss scale.
    order: the variables' numbers in the order in which their gradients were given.
    """

    group: Group
    count: int | None
    optimizer: Optimizer
    gradients: list[Gradient | None]
    scale: float = 1.0
    order: list[int] = field(default_factory=list)
    filling: Filling | None = None

    def give(self, variable: Any, gradient: Gradient) -> None:
        """Take the final gradient of one variable; a tape's sink."""
        i = self.group.index[id(variable)]
        if isinstance(gradient, IndexedSlices):
            gradient = gradient.coalesced()
        self.gradients[i] = gradient
        self.order.append(i)
        if self.filling is not None:
            self.filling.given(self, i)

    def given_all(self) -> None:
        """Note that the backward pass is over: what has no gradient now is unused."""
        if self.filling is not None:
            self.filling.given_all(self)


@leaf
@dataclass(slots=True)
class Combined:
    """What comes out: for each place the gradients to apply, times `scale`.

    An IndexedSlices among them has each of its indices once. The sums are there once the events
    have happened. step: the one whose gradients they are. came_from: while somebody watches, for
    each replica and variable the version of it that the replica's gradient comes from.
    """

    group: Group
    rows: Sequence[Sequence[Gradient]]
    scale: float
    step: int
    events: Sequence[Event] = ()
    came_from: dict[tuple[int, Variable], int] = field(default_factory=dict)

    def note_origin(self, replica: int, contribution: Contribution) -> None:
        """Note from what a replica's gradients come: what it has read last."""
        if contribution.count == 0:  # it has no say
            return
        pairs = zip(contribution.group.variables, contribution.gradients, strict=True)
        for variable, gradient in pairs:
            if gradient is not None and replica in variable.seen:
                self.came_from[replica, variable] = variable.seen[replica]

    def tell_ages(self, place: int, replica: int | None = None) -> None:
        """Tell how old the gradients of one replica, or of all, are to the copies of a place."""
        for (whose, variable), version in self.came_from.items():
            if replica is None or whose == replica:
                observe.applied(variable.name, whose, variable.copies[place].version - version)

    def wait(self) -> None:
        """Wait until the sums are there; raises what taking them has raised."""
        for event in self.events:
            event.wait(DEADLINE)
        self.events = ()

    def finite(self) -> bool:
        """Whether the gradients of the first place have neither a NaN nor an infinity."""
        for gradient, copy in zip(self.rows[0], self.group.copies[0], strict=True):
            sparse = isinstance(gradient, IndexedSlices)
            array = gradient.values.array if sparse else gradient
            if copy.device.ops.first_nonfinite([array]) != -1:
                return False
        return True


class Nothing:
    """Replicas keep their own gradients: no meeting."""

    held: Sequence[Held] = ()

    def combine(self, contribution: Contribution, replica: int) -> Combined | None:
        """Return the replica's own gradients, or None where it has no example."""
        (used,) = without_unused([contribution])
        if used.count == 0:
            return None
        combined = Combined(
            used.group, [used.gradients] * used.group.places, used.scale, context.frame().step
        )
        if observe.counting:
            combined.note_origin(replica, contribution)
        return combined

    def predicted_bytes(self, rows: Sequence[Sequence[Variable]]) -> Traffic:
        """Nothing moves."""
        return Traffic()


class MeetingOfAll(ABC):
    """The gradients of all replicas are combined in a meeting."""

    held: Sequence[Held] = ()  # what is kept from step to step

    @abstractmethod
    def combine(self, contributions: Sequence[Contribution], threads: int) -> Combined | None:
        """Return the gradients to apply now, or None where there is no example behind them."""

    @property
    @abstractmethod
    def sums(self) -> SumOfAll:
        """How the gradients of one step are summed."""

    def turn(self, group: Group) -> int:
        """Return which of a group's buckets the next sums go to."""
        return 0

    def predicted_bytes(self, rows: Sequence[Sequence[Variable]]) -> Traffic:
        """Return what is moved to sum a step's gradients, those of each row together."""
        traffic = Traffic()
        for row in rows:
            traffic.update(self.sums.sum_bytes(row))
        return traffic


class SumOfAll(MeetingOfAll):
    """All gradients are summed, to be scaled to the mean; a subclass says where the sum goes.

    `original` keeps the ancestors' factor and their disregard of counts: 1 (a sum), or 1/n.
    """

    def __init__(self, communicator: Communicator, *, original: str | None) -> None:
        self._communicator = communicator
        self._original = original

    @property
    def sums(self) -> SumOfAll:
        return self

    def combine(self, contributions: Sequence[Contribution], threads: int) -> Combined | None:
        combined = self.begin(contributions, threads, "compute", 0)
        if combined is not None:
            combined.wait()
        return combined

    def begin(
        self, contributions: Sequence[Contribution], threads: int, stream: str, turn: int
    ) -> Combined | None:
        """Sum all gradients on a stream, where that has not begun during the backward pass.

        Return the sums to be, or None where no replica has an example.
        """
        used = without_unused(contributions)
        group = used[0].group
        weights, scale = self.weights([contribution.count for contribution in used])
        if scale is None:
            return None
        combined = Combined(group, (), scale * used[0].scale, context.frame().step)
        if observe.counting:
            for replica, contribution in enumerate(contributions):
                combined.note_origin(replica, contribution)
        filling = contributions[0].filling
        if filling is not None and filling.finish(contributions, combined):
            return combined
        sources, weights = with_a_say(self.brought(used), weights)

        def take() -> None:
            with group.told("reduce", "gradients", combined.step):
                combined.rows = self.sum_all(group, sources, weights, threads, turn)

        on = group.copies[0][0].device.stream(stream)
        on.submit(take)
        combined.events = (on.record(),)
        return combined

    def brought(self, contributions: Sequence[Contribution]) -> list[Row]:
        """Return what each replica brings as a row on its device; of a gradient None, None."""
        pairs = zip(self._communicator.devices, contributions, strict=True)
        return [Row.on(device, contribution.gradients) for device, contribution in pairs]

    def sum_all(
        self,
        group: Group,
        sources: Sequence[Row],
        weights: list[float] | None,
        threads: int,
        turn: int,
    ) -> Sequence[Sequence[Gradient]]:
        """Return the sums for each place: whole ones in one pass, sparse ones one by one."""
        sparse = _sparse_columns(sources)
        if not sparse:
            return self._sum(
                group, [whole(group.variables, row) for row in sources], weights, threads, turn
            )
        dense = [i for i in range(len(group.variables)) if i not in sparse]
        rows: list[list[Gradient]] = [[None] * len(group.variables) for _ in group.copies]
        if dense:
            chosen = [row.part(dense) for row in sources]
            sums = self.sum_all(group.part(dense), chosen, weights, threads, turn)
            for row, arrays in zip(rows, sums, strict=True):
                for i, array in zip(dense, arrays, strict=True):
                    row[i] = array
        for i in sparse:
            total = _sum_rows([row[i] for row in sources], weights)
            for row, copies in zip(rows, group.copies, strict=True):
                row[i] = total.to(copies[i].device)
        return rows

    def _sum(
        self,
        group: Group,
        sources: list[Row],
        weights: list[float] | None,
        threads: int,
        turn: int,
    ) -> Sequence[Row]:
        """Return for each place the sum of the sources, one row for each replica."""
        rows = group.rows(turn)
        self.sum_into(rows, sources, weights, threads)
        return rows

    @abstractmethod
    def sum_into(
        self,
        rows: Sequence[Row],
        sources: Sequence[Row],
        weights: Sequence[float] | None,
        threads: int,
    ) -> None:
        """Put the sum of the sources into the row of each place."""

    @abstractmethod
    def sum_bytes(self, variables: Sequence[Variable]) -> Traffic:
        """Return what is moved to sum gradients of these, all in one pass."""

    def weights(self, counts: Sequence[int | None]) -> tuple[list[float] | None, float | None]:
        """Return each replica's weight, None where all are 1, and the factor of the sum.

        The factor is None where there is no example at all. Raises UsageError where only some
        replicas gave a count.
        """
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


class MeanAtVariable(SumOfAll):
    """The mean is formed where the one copy of the variable lives."""

    def sum_into(
        self,
        rows: Sequence[Row],
        sources: Sequence[Row],
        weights: Sequence[float] | None,
        threads: int,
    ) -> None:
        self._communicator.reduce(sources, rows[0], weights, threads=threads)

    def sum_bytes(self, variables: Sequence[Variable]) -> Traffic:
        """To where each variable's one copy is."""
        return self._communicator.predicted_bytes(*_outlined(variables))


class AllReduce(SumOfAll):
    """Every replica gets the mean for its own copy; one that is alone has it already."""

    def _sum(
        self,
        group: Group,
        sources: list[Row],
        weights: list[float] | None,
        threads: int,
        turn: int,
    ) -> Sequence[Row]:
        if len(sources) == 1 and weights is None:
            return sources
        return super()._sum(group, sources, weights, threads, turn)

    def sum_into(
        self,
        rows: Sequence[Row],
        sources: Sequence[Row],
        weights: Sequence[float] | None,
        threads: int,
    ) -> None:
        self._communicator.all_reduce(sources, rows, weights, threads=threads)

    def sum_bytes(self, variables: Sequence[Variable]) -> Traffic:
        """To every copy of every variable; who is alone keeps its own."""
        if len(self._communicator.devices) == 1:
            return Traffic()
        return self._communicator.predicted_bytes(*_outlined(variables))


def without_unused(contributions: Sequence[Contribution]) -> Sequence[Contribution]:
    """Leave out the variables that no replica has used; raises UsageError where that is all."""
    columns = zip(*[contribution.gradients for contribution in contributions], strict=True)
    used = [i for i, column in enumerate(columns) if any(part is not None for part in column)]
    group = contributions[0].group
    if len(used) == len(group.variables):
        return contributions
    if not used:
        raise UsageError(
            "no replica has a gradient for any of the variables; is the loss computed from them?"
        )
    group.tell_unused(used)
    part = group.part(used)
    return [
        replace(contribution, group=part, gradients=[contribution.gradients[i] for i in used])
        for contribution in contributions
    ]


def with_a_say(
    sources: Sequence[Row], weights: list[float] | None
) -> tuple[Sequence[Row], list[float] | None]:
    """Leave out the replicas without an example: they have no say, not even with a NaN."""
    if weights is None:
        return sources, None
    return (
        [row for row, weight in zip(sources, weights, strict=True) if weight],
        [weight for weight in weights if weight],
    )


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


def whole(variables: Sequence[Variable], gradients: Row) -> Row:
    """Return a replica's gradients as arrays: zeros for what only other replicas have used."""
    row = Row(gradients, gradients.devices)
    for i, (gradient, device) in enumerate(zip(gradients, gradients.devices, strict=True)):
        if gradient is None:
            row[i] = device.ops.full(variables[i].shape, 0, variables[i].dtype)
        elif isinstance(gradient, IndexedSlices):
            row[i] = gradient.to_dense().array
    return row


def _outlined(variables: Sequence[Variable]) -> tuple[list[Outline], list[list[Device]]]:
    """Return the gradients' outlines, and for each place the devices of the copies."""
    places = zip(*[variable.copies for variable in variables], strict=True)
    return (
        [Outline.of(variable) for variable in variables],
        [[copy.device for copy in place] for place in places],
    )


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
