"""Overlap: gradients are summed bucket by bucket while the backward pass goes on.

    backward pass of replica 0    [ d | c |   b   | a ]─┐
    backward pass of replica 1    [ d |   c   | b | a ]─┤ meet, apply
    communication stream              [d]     [c+b]  [a]

A bucket is a few variables whose gradients are summed together. The first backward pass of a group
of variables shows in which order its gradients become final; from then on they fill buckets in
that order. The last replica to fill a bucket gives its sum to the communication stream, one bucket
after the other in the same order everywhere. The meeting waits for the sums. Each element is summed
as it would be without buckets, so no bit differs.

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
from minidist.device import Event, Stream
from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.patience import DEADLINE
from minidist.variable_mgr.combine import (
    Combined,
    Contribution,
    MeetingOfAll,
    SumOfAll,
    whole,
    with_a_say,
)
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
    def of(cls, contribution: Contribution, cap: float) -> Plan:
        """Plan after one backward pass; a bucket is full at `cap` bytes, the first one at 1 MB.

        Variables without a gradient in it, and those with a sparse one, are in no bucket.
        """
        buckets: list[list[int]] = []
        room = 0.0
        for i in contribution.order:
            if isinstance(contribution.gradients[i], IndexedSlices):
                continue
            if room <= 0:
                room = cap if buckets else min(FIRST_BUCKET, cap)
                buckets.append([])
            buckets[-1].append(i)
            room -= contribution.group.copies[0][i].array.nbytes
        bucket_of = {i: k for k, members in enumerate(buckets) for i in members}
        return cls(contribution.group, tuple(map(tuple, buckets)), bucket_of)


class Overlap:
    """Plans buckets for groups of variables, and lets their replicas fill them."""

    def __init__(self, combine: MeetingOfAll, replicas: int, cap: float, threads: int) -> None:
        """cap: bytes of a bucket. threads: how many each sum may use."""
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

    def met(self, contributions: Sequence[Contribution]) -> None:
        """Note, in the meeting, that what has been filled is being combined."""
        group = contributions[0].group
        group.filling = None
        if group.plan is None and contributions[0].order:
            group.plan = Plan.of(contributions[0], self._cap)


class Filling:
    """The buckets of one step, which all replicas fill during their backward passes."""

    def __init__(
        self, plan: Plan, run: Run, sums: SumOfAll, turn: int, replicas: int, threads: int
    ) -> None:
        self.run = weakref.ref(run)
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
        self._event: Event | None = None  # of the last one
        self._lock = observe.Lock(hands_over=True)

    def join(self, contribution: Contribution, replica: int) -> None:
        self._void |= self._contributions[replica] is not None
        self._contributions[replica] = contribution
        self._left[id(contribution)] = [len(members) for members in self._plan.buckets]
        contribution.filling = self

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
                self._begin(self._plan.buckets[self._begun])
                self._begun += 1

    def _begin(self, members: Sequence[int]) -> None:
        """Give the sum of one bucket to the communication stream."""
        contributions = [c for c in self._contributions if c is not None]
        try:
            weights, scale = self._sums.weights([c.count for c in contributions])
        except UsageError:  # the meeting will say it
            return
        if scale is None:
            return
        rows = [row.part(members) for row in self._sums.brought(contributions)]
        sources, weights = with_a_say(rows, weights)
        stream = self._stream()
        stream.submit(partial(self._sum, members, sources, weights, context.frame().step))
        self._event = stream.record()

    def _sum(
        self,
        members: Sequence[int],
        sources: Sequence[Row],
        weights: list[float] | None,
        step: int,
    ) -> None:
        bucket = self._plan.group.part(members)
        variables = bucket.variables
        with bucket.told("reduce", "a bucket of gradients", step):
            self._sums.sum_into(
                [row.part(members) for row in self._rows],
                [whole(variables, source) for source in sources],
                weights,
                self._threads,
            )

    def _stream(self) -> Stream:
        return self._plan.group.copies[0][0].device.stream("communication")

    def finish(self, contributions: Sequence[Contribution], combined: Combined) -> bool:
        """Put the sums that have begun, and those of variables in no bucket, into `combined`.

        Return False where a replica has brought its gradients in another way, or more than once, so
        that nothing here counts.
        """
        if self._void or any(each.filling is not self for each in contributions):
            if self._event is not None:
                self._event.wait(DEADLINE)
            return False
        whole_group, group = self._plan.group, combined.group
        rows = [
            [row[whole_group.index[id(variable)]] for variable in group.variables]
            for row in self._rows
        ]
        rest = [
            i
            for i, variable in enumerate(group.variables)
            if whole_group.index[id(variable)] not in self._plan.bucket_of
        ]
        if rest:
            members = [whole_group.index[id(group.variables[i])] for i in rest]
            weights, _ = self._sums.weights([c.count for c in contributions])
            brought = [row.part(members) for row in self._sums.brought(contributions)]
            sources, weights = with_a_say(brought, weights)
            part = group.part(rest)
            with part.told("reduce", "gradients in no bucket", combined.step):
                sums = self._sums.sum_all(part, sources, weights, self._threads, self._turn)
            for row, arrays in zip(rows, sums, strict=True):
                for i, array in zip(rest, arrays, strict=True):
                    row[i] = array
        combined.rows = rows
        combined.events = () if self._event is None else (self._event,)
        return True
