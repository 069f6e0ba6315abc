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

Of several workers each brings its own replicas' gradients, and the sums are over those of all:
counts, weights and the number n are of all replicas, as the workers have agreed (agreement.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from minidist import context, observe
from minidist.cluster.site import Site
from minidist.comm import Communicator, Row
from minidist.device import Device
from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.patience import DEADLINE
from minidist.tape import Gradient
from minidist.traffic import Outline, Traffic
from minidist.variable import Variable
from minidist.variable_mgr.agreement import Agreement, find
from minidist.variable_mgr.contribution import Combined, Contribution, without_unused
from minidist.variable_mgr.errand import Errand
from minidist.variable_mgr.group import Group
from minidist.variable_mgr.held import Held
from minidist.variable_mgr.sparse import rows_of_all, sum_rows

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class Nothing:
    """Replicas keep their own gradients: no meeting."""

    held: Sequence[Held] = ()

    def combine(self, contribution: Contribution, replica: int) -> Combined | None:
        """Return the replica's own gradients, or None where it has no example."""
        (used,) = without_unused([contribution], find([contribution]))
        if used.count == 0:
            return None
        combined = Combined(
            used.group, [used.gradients] * used.group.places, used.scale, context.frame().step
        )
        if observe.counting:
            combined.note_origin(replica, contribution)
        return combined

    def bucket(self, group: Group) -> None:
        """Gradients stay where they are."""

    def predicted_bytes(
        self, rows: Sequence[Sequence[Variable]], optimizer: Optimizer | None
    ) -> Traffic:
        """Nothing moves."""
        return Traffic()


class MeetingOfAll(ABC):
    """The gradients of all replicas are combined in a meeting."""

    held: Sequence[Held] = ()  # what is kept from step to step

    @abstractmethod
    def combine(
        self, contributions: Sequence[Contribution], agreed: Agreement, threads: int
    ) -> Combined | None:
        """Return the gradients to apply now, or None where there is no example behind them.

        contributions: those of this process's replicas. agreed: what is known of all replicas.
        """

    @property
    @abstractmethod
    def sums(self) -> SumOfAll:
        """How the gradients of one step are summed."""

    def turn(self, group: Group) -> int:
        """Return which of a group's buckets the next sums go to."""
        return 0

    def bucket(self, group: Group) -> Row | None:
        """Return the bucket in which a replica's gradients are best computed; None: anywhere."""
        return self.sums.bucket_at(group, self.turn(group))

    def close(self) -> None:
        """Wait for sums that are under way; nothing will be run any more."""
        self.sums.close_communicator()

    def predicted_bytes(
        self, rows: Sequence[Sequence[Variable]], optimizer: Optimizer | None
    ) -> Traffic:
        """Return what is moved to sum a step's gradients, those of each row together.

        optimizer: the one that they are for, if it is known.
        """
        traffic = Traffic()
        for row in rows:
            traffic.update(self.sums.sum_bytes(row))
        return traffic


class Addends(NamedTuple):
    """What is to be added up, and for whom.

    combined: what is to come out, yet without the sums. sources: a row for each replica of this
    process; of a gradient None, None. weights: of all replicas; None: 1. sparse: the variables'
    numbers of which all that there is are IndexedSlices. reusable: whether sums may be put into
    the sources.
    """

    combined: Combined
    sources: list[Row]
    weights: list[float] | None
    sparse: list[int]
    reusable: bool


class SumOfAll(MeetingOfAll):
    """All gradients are summed, to be scaled to the mean; a subclass says where the sum goes.

    site: where the replicas are; by default in this process, on the communicator's devices.
    `original` keeps the ancestors' factor and their disregard of counts: 1 (a sum), or 1/n.
    """

    def __init__(
        self, communicator: Communicator, site: Site | None = None, *, original: str | None
    ) -> None:
        self._communicator = communicator
        self._original = original
        self.site = Site.alone(communicator.devices) if site is None else site
        self._latest: Errand | None = None  # on a stream that does one after the other

    @property
    def sums(self) -> SumOfAll:
        return self

    def combine(
        self, contributions: Sequence[Contribution], agreed: Agreement, threads: int
    ) -> Combined | None:
        combined = self.begin(contributions, agreed, threads, "compute", 0)
        if combined is not None:
            combined.wait()
        return combined

    def begin(
        self,
        contributions: Sequence[Contribution],
        agreed: Agreement,
        threads: int,
        stream: str,
        turn: int,
    ) -> Combined | None:
        """Sum all gradients on a stream, where that has not begun during the backward pass.

        Return the sums to be, or None where no replica has an example.
        """
        addends = self.addends(contributions, agreed)
        if addends is None:
            return None
        combined, sources, weights, sparse, reusable = addends
        group = combined.group
        if agreed.whole and contributions[0].filling is not None:
            combined.errand = contributions[0].filling.errand
            contributions[0].filling.finish(combined, sources, weights, sparse)
            return combined

        def take() -> None:
            with group.told("reduce", "gradients", combined.step):
                how = (weights, threads, turn, sparse)
                combined.rows = self.sum_all(group, sources, *how, reusable=reusable)

        combined.errand = self.errand(group, stream)
        combined.errand.add(take)
        return combined

    def addends(self, contributions: Sequence[Contribution], agreed: Agreement) -> Addends | None:
        """Return what is to be added up, or None where no replica has an example."""
        used = without_unused(contributions, agreed)
        weights, scale = self.weights(agreed.counts)
        if scale is None:
            return None
        combined = Combined(used[0].group, (), scale * used[0].scale, context.frame().step)
        if observe.counting:
            combined.first = self.site.first
            for replica, contribution in enumerate(contributions):
                combined.note_origin(replica, contribution)
        sparse = [k for k, i in enumerate(agreed.used) if i in agreed.sparse]
        reusable = all(contribution.reusable for contribution in used)
        return Addends(combined, self.brought(used), weights, sparse, reusable)

    def errand(self, group: Group, stream: str) -> Errand:
        """Return what takes sums of a group on one of its streams."""
        patience = DEADLINE
        if self.site.peers.count > 1:  # the peers' own patience ends first, with better words
            patience = 2 * self.site.sums.patience()[1]
        on = group.copies[0][0].device.stream(stream)
        self._latest = Errand(on, patience, tell=self.site.sums.fail)
        return self._latest

    def bucket_at(self, group: Group, turn: int) -> Row | None:
        """Return what `bucket` returns, of a turn."""
        return None

    def settle(self) -> None:
        """Wait until nothing is under way any more, whatever has become of it."""
        if self._latest is not None:
            self._latest.end()

    def close_communicator(self) -> None:
        """Sum no more."""
        self.settle()
        self._communicator.close()

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
        sparse: Sequence[int],
        *,
        reusable: bool = False,
    ) -> Sequence[Sequence[Gradient]]:
        """Return the sums for each place: whole ones in one pass, sparse ones one by one.

        sources: a row for each replica of this process. weights: of all replicas. reusable: whether
        the sums may be put into the sources.
        """
        if not sparse:
            brought = [whole(group.variables, row) for row in sources]
            return self._sum(group, brought, weights, threads, turn, reusable)
        dense = [i for i in range(len(group.variables)) if i not in sparse]
        rows: list[list[Gradient]] = [[None] * len(group.variables) for _ in group.copies]
        if dense:
            chosen = [row.part(dense) for row in sources]
            how = (weights, threads, turn, ())
            sums = self.sum_all(group.part(dense), chosen, *how, reusable=reusable)
            for row, arrays in zip(rows, sums, strict=True):
                for i, array in zip(dense, arrays, strict=True):
                    row[i] = array
        self.put_sparse(rows, group, sources, weights, sparse)
        return rows

    def put_sparse(
        self,
        rows: Sequence[list[Gradient]],
        group: Group,
        sources: Sequence[Row],
        weights: list[float] | None,
        sparse: Sequence[int],
    ) -> None:
        """Put the sums of sparse gradients into the row of each place."""
        own = [1.0] * len(sources)
        if weights is not None:
            own = weights[self.site.first :][: len(sources)]
        pairs = zip(sources, own, strict=True)
        brought = [[row[i] if weight else None for i in sparse] for row, weight in pairs]
        device = self._communicator.devices[0]
        parts_of = rows_of_all(
            self.site.sums, device, [group.variables[i] for i in sparse], brought
        )
        for i, parts in zip(sparse, parts_of, strict=True):
            total = sum_rows(parts, weights)
            for row, copies in zip(rows, group.copies, strict=True):
                row[i] = total.to(copies[i].device)

    def _sum(
        self,
        group: Group,
        sources: list[Row],
        weights: list[float] | None,
        threads: int,
        turn: int,
        reusable: bool,
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

    def bucket_at(self, group: Group, turn: int) -> Row | None:
        """Return the bucket of ranks of one replica: gradients are summed where they are."""
        made = group.made(turn) if self._shares(group) else ()
        return made[0] if made else None

    def _shares(self, group: Group) -> bool:
        """Whether ranks of one replica have buckets that others may reach."""
        return self.site.peers.count > 1 and group.places == 1

    def _sum(
        self,
        group: Group,
        sources: list[Row],
        weights: list[float] | None,
        threads: int,
        turn: int,
        reusable: bool,
    ) -> Sequence[Row]:
        """Put the sums where the gradients are, if that may be, or else into buckets.

        Ranks of one replica have buckets in memory that they share, where there is any: each then
        adds up its share of all of them, and nothing is handed over.
        """
        if self.site.replicas == 1:
            return sources
        shared = self._shares(group)
        rows: Sequence[Row] = sources
        if shared or not reusable:
            rows = group.rows(turn, self._communicator if shared else None)
        self.sum_into(rows, sources, weights, threads)
        return rows

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
        if self.site.replicas == 1:
            return Traffic()
        return self._communicator.predicted_bytes(*_outlined(variables))


def whole(variables: Sequence[Variable], gradients: Row, without: Sequence[int] = ()) -> Row:
    """Return a replica's gradients as arrays: zeros for what only other replicas have used.

    Of the variables of the numbers `without` there is None.
    """
    row = Row(gradients, gradients.devices)
    for i, (gradient, device) in enumerate(zip(gradients, gradients.devices, strict=True)):
        if i in without:
            row[i] = None
        elif gradient is None:
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
