"""Overlap: gradients are summed bucket by bucket while the backward pass goes on.

    backward pass of replica 0    [ d | c |   b   | a ]─┐
    backward pass of replica 1    [ d |   c   | b | a ]─┤ meet, apply
    communication stream              [d]     [c+b]  [a]

A bucket is a few variables whose gradients are summed together. The first backward pass of a group
of variables shows in which order its gradients become final; from then on they fill buckets in
that order. The last replica to fill a bucket gives its sum to the communication stream, one bucket
after the other in the same order everywhere. The meeting waits for the sums. Each element is summed
as it would be without buckets, so no bit differs.

Of several workers all fill the same buckets, in the order that worker 0's first replica has shown.
Who computes meets nobody; so it is on the communication stream, before the first sum, that workers
tell each other how many examples are behind their gradients. Where one of them cannot use what it
has filled, or has filled none, the meeting hears it, and sums everything anew.

The sizes are those of PyTorch's DistributedDataParallel (Li et al. 2020, section 4.2): the first
bucket is small, so that the first sum begins early.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from minidist import context, observe
from minidist.comm import Row
from minidist.errors import UsageError
from minidist.variable_mgr.agreement import DENSE, NEVER, NO, WASTE, WHOLE, Agreement, pack, unpack
from minidist.variable_mgr.combine import MeetingOfAll, SumOfAll, whole
from minidist.variable_mgr.contribution import Combined, Contribution
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.run import Run

FIRST_BUCKET = 1 << 20  # bytes


@dataclass(frozen=True)
class Plan:
    """The buckets of a group: the numbers of their variables, in the order of filling."""

    group: Group
    buckets: tuple[tuple[int, ...], ...]
    bucket_of: dict[int, int]

    @classmethod
    def of(cls, group: Group, agreed: Agreement, cap: float) -> Plan:
        """Plan after one backward pass; a bucket is full at `cap` bytes, the first one at 1 MB.

        Variables without a gradient in it, and those with only sparse ones, are in no bucket.
        """
        buckets: list[list[int]] = []
        room = 0.0
        for i in agreed.order:
            if not agreed.found[i] & DENSE:
                continue
            if room <= 0:
                room = cap if buckets else min(FIRST_BUCKET, cap)
                buckets.append([])
            buckets[-1].append(i)
            room -= group.copies[0][i].array.nbytes
        bucket_of = {i: k for k, members in enumerate(buckets) for i in members}
        return cls(group, tuple(map(tuple, buckets)), bucket_of)


class Overlap:
    """Plans buckets for groups of variables, and lets their replicas fill them."""

    def __init__(self, combine: MeetingOfAll, replicas: int, cap: float, threads: int) -> None:
        """replicas: of this process. cap: bytes of a bucket. threads: how many each sum may use."""
        self._combine = combine
        self._replicas = replicas
        self._cap = cap
        self._threads = threads
        self._lock = threading.Lock()

    def join(self, contribution: Contribution, replica: int) -> None:
        """Let a replica's contribution, still empty, fill buckets, where they are planned."""
        group = contribution.group
        run = context.frame().run
        if group.plan is None or run is None:
            return
        with self._lock:
            filling: Filling | None = group.filling
            if filling is None or filling.run() is not run:  # that of a run that has failed
                filling = group.filling = Filling(
                    group.plan,
                    run,
                    self._combine.sums,
                    self._combine.turn(group),
                    self._replicas,
                    self._threads,
                )
        filling.join(contribution, replica)

    def buckets(self, group: Group) -> Sequence[Sequence[int]]:
        """Return which of a group's variables are summed together in the next step.

        Those in no bucket are summed together, as all are before the first backward pass.
        """
        return group.plan.buckets if group.plan is not None else ()

    def filled(self, contributions: Sequence[Contribution]) -> int:
        """Return, in the meeting, what has become of this process's buckets."""
        filling: Filling | None = contributions[0].group.filling
        return NO if filling is None else filling.state(contributions)

    def met(self, group: Group, agreed: Agreement) -> None:
        """Note, in the meeting, that what has been filled is being combined, or is not."""
        filling: Filling | None = group.filling
        group.filling = None
        if agreed.begun and not agreed.whole:
            sums = self._combine.sums
            if filling is not None and agreed.filled[sums.site.peers.me] != NO:
                filling.give_up()
            else:
                decline(sums, group)
        if group.plan is None and agreed.order and NEVER not in agreed.filled:
            group.plan = Plan.of(group, agreed, self._cap)


class Filling:
    """The buckets of one step, which all replicas fill during their backward passes."""

    def __init__(
        self, plan: Plan, run: Run, sums: SumOfAll, turn: int, replicas: int, threads: int
    ) -> None:
        self.run = weakref.ref(run)
        self.errand = sums.errand(plan.group, "communication")
        self._plan = plan
        self._sums = sums
        self._rows = plan.group.rows(turn)
        self._turn = turn
        self._threads = threads
        self._contributions: list[Contribution | None] = [None] * replicas
        self._void = False  # a replica has begun its backward pass anew: what it filled is wrong
        self._left: dict[int, list[int]] = {}  # by id of contribution: gradients still to come
        self._filled_by = [0] * len(plan.buckets)
        self._begun = 0  # sums, in the order of the buckets
        self._joined = False  # all replicas of this process have, so that sums can begin
        self._counts: Sequence[int | None] | None = None  # of all replicas; None: take no sums
        self._lock = observe.Lock(hands_over=True)

    # --- during the backward passes

    def join(self, contribution: Contribution, replica: int) -> None:
        self._left[id(contribution)] = [len(members) for members in self._plan.buckets]
        contribution.filling = self
        with self._lock:
            self._void |= self._contributions[replica] is not None
            self._contributions[replica] = contribution
            if not self._joined and None not in self._contributions:
                self._joined = True
                self._counts = counts = [each.count for each in self._brought]
                if self._sums.site.peers.count > 1:
                    self.errand.add(partial(self._agree, counts))

    @property
    def _brought(self) -> list[Contribution]:
        return [contribution for contribution in self._contributions if contribution is not None]

    def given(self, contribution: Contribution, variable: int) -> None:
        """Note that a replica has brought the gradient of a variable."""
        bucket = self._plan.bucket_of.get(variable)
        if bucket is None:
            return
        left = self._left[id(contribution)]
        left[bucket] -= 1
        if not left[bucket]:
            self._filled(bucket)

    def given_all(self, contribution: Contribution) -> None:
        """Note that a replica brings no more: zeros complete its buckets."""
        for bucket, left in enumerate(self._left[id(contribution)]):
            if left:
                self._filled(bucket)

    def _filled(self, bucket: int) -> None:
        with self._lock:
            self._filled_by[bucket] += 1
            while not self._void and self._begun < len(self._filled_by):
                if self._filled_by[self._begun] < len(self._contributions):
                    break
                self._begin()

    def _begin(self) -> None:
        """Give the sum of the next bucket to the communication stream."""
        members = self._plan.buckets[self._begun]
        self._begun += 1
        rows = [row.part(members) for row in self._sums.brought(self._brought)]
        self.errand.add(partial(self._sum, members, rows, context.frame().step))

    # --- on the communication stream

    def _agree(self, counts: Sequence[int | None]) -> None:
        self._counts = _agree(self._sums, counts)

    def _sum(self, members: Sequence[int], sources: Sequence[Row], step: int) -> None:
        if self._counts is None:
            return
        try:
            weights, scale = self._sums.weights(self._counts)
        except UsageError:  # the meeting will say it
            return
        if scale is None:
            return
        bucket = self._plan.group.part(members)
        variables = bucket.variables
        with bucket.told("reduce", "a bucket of gradients", step):
            self._sums.sum_into(
                [row.part(members) for row in self._rows],
                [whole(variables, source) for source in sources],
                weights,
                self._threads,
            )

    # --- in the meeting

    def state(self, contributions: Sequence[Contribution]) -> int:
        """Return whether what was filled is what these bring."""
        if not self._joined:
            return NO
        same = all(contribution.filling is self for contribution in contributions)
        return WHOLE if same and not self._void else WASTE

    def give_up(self) -> None:
        """Wait for the sums that are under way; they are of no use.

        Other ranks are about to take part in all of them, so this one does too.
        """
        if self._sums.site.peers.count > 1:
            while self._begun < len(self._filled_by):
                self._begin()
        self._leave()
        self.errand.wait()

    def finish(
        self,
        combined: Combined,
        sources: Sequence[Row],
        weights: list[float] | None,
        sparse: Sequence[int],
    ) -> None:
        """Put the sums that have begun, and those of variables in no bucket, into `combined`.

        sources: a row for each replica, of the combined variables. sparse: which of them are.
        """
        index, group = self._plan.group.index, combined.group
        numbers = [index[id(variable)] for variable in group.variables]
        rows = [[row[i] for i in numbers] for row in self._rows]
        combined.rows = rows
        self._leave()
        rest = [k for k, i in enumerate(numbers) if i not in self._plan.bucket_of]
        if not rest:
            return
        part, brought = group.part(rest), [row.part(rest) for row in sources]
        among = [k for k, i in enumerate(rest) if i in sparse]

        def take() -> None:
            how = (weights, self._threads, self._turn, among)
            with part.told("reduce", "gradients in no bucket", combined.step):
                sums = self._sums.sum_all(part, brought, *how)
            for row, arrays in zip(rows, sums, strict=True):
                for i, array in zip(rest, arrays, strict=True):
                    row[i] = array

        self.errand.add(take)

    def _leave(self) -> None:
        """Let go of the gradients, which know this filling: a ring would keep them for long."""
        self._contributions.clear()


def _agree(sums: SumOfAll, counts: Sequence[int | None] | None) -> Sequence[int | None] | None:
    """Return how many examples are behind all replicas' gradients; None where a rank says None."""
    brought = b"" if counts is None else pack(counts)
    every = sums.site.sums.meet("sum gradients during the backward pass", brought)
    return None if b"" in every else unpack(b"".join(every))


def decline(sums: SumOfAll, group: Group) -> None:
    """Answer ranks that have filled buckets, where this one has not: they are not summed."""
    errand = sums.errand(group, "communication")
    errand.add(partial(_agree, sums, None))
    errand.wait()
