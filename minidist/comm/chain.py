"""Chain: a partial sum travels from machine to machine, and the total travels back.

    machine 0   g0 g1   g0+g1 ──►                                  ◄── total
    machine 1   g2 g3            (g0+g1)+g2+g3 ──►         ◄── total
    machine 2   g4 g5                             … +g4+g5 = total

Each machine adds its replicas' rows one by one to what comes in, so the sum is the serial one over
all replicas; and however many these are, a machine sends one row each way. Many blocks are on their
way at a time, so that links carry partial sums one way while totals come back the other.

xring is made of the same chains, over the machines' own sums S. Of each tensor, chunk c begins with
machine c, so that every machine begins a chain, adds to the others, and ends one:

    chunk 0   S0 ──► +S1 ──► +S2      chunk 1   S1 ──► +S2 ──► +S0      chunk 2   S2 ──► +S0 ──► +S1
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.between import Between, Flight, Share
from minidist.comm.cutting import extent
from minidist.comm.lane import PARTS, TOTALS, Lane, Under
from minidist.comm.orders import accumulator, add, scaled, store
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.device import Array, host
from minidist.traffic import Outline, Traffic


class Chain(Between):
    """A chain over the machines of a lane.

    inside: the order in which each machine sums its own rows first; None: it adds them one by one.
    """

    def __init__(self, lane: Lane, inside: str | None = None) -> None:
        self._lane = lane
        self._inside = inside
        self.order = "serial" if inside is None else f"{inside}/ring"
        # So long it takes from a partial sum's leaving to the return of the total.
        self.lag = 2 * (lane.count - 1 - lane.me) if inside is None else lane.count

    def begin(self, share: Share) -> Flight:
        lane = self._lane
        way = [*share.saying[share.first :], *share.saying[: share.first]]
        scratch, size = Scratch(), extent(share.at)
        dtype = share.like[0].dtype
        total = scratch.flat(host(), size, dtype)
        if lane.me not in way:  # it only hears of the total, from who has begun
            arriving = lane.receive(way[0], total, TOTALS)
            return _Link(lane, share, scratch, total, [arriving], [], [])
        place = way.index(lane.me)
        rows, weights = list(share.rows), share.weights
        partial = scratch.flat(host(), size, accumulator(dtype))
        if place > 0:
            coming = scratch.flat(host(), size, accumulator(dtype))
            arriving = lane.receive(way[place - 1], coming, PARTS)
            rows, weights = self._own(share, rows, scratch)
            lane.wait([arriving])
            rows = [share.row(coming), *rows]
            weights = weights and [1.0, *weights]
        order = "serial" if place > 0 or self._inside is None else self._inside
        here, threads = share.row(partial), share.threads
        add(order, [here], rows, weights, at=share.at, sizes=share.sizes, threads=threads)
        if place + 1 < len(way):
            leaving = [lane.send(way[place + 1], partial, PARTS)]
            arrivals = [lane.receive(way[place + 1], total, TOTALS)]
        else:
            leaving, arrivals = [], []
            scaled(here, share.scale, threads)
            store([share.row(total)], here, threads)
        outside = [m for m in range(lane.count) if m not in way] if place == 0 else [way[place - 1]]
        return _Link(lane, share, scratch, total, arrivals, leaving, outside)

    def settle(self) -> None:
        self._lane.settle()

    def predicted_bytes(self, block: Outline, number: int, first: int) -> Traffic:
        """The partial sum goes to the next one, unless it began there, and the total back."""
        lane, traffic = self._lane, Traffic()
        after, before = (lane.me + 1) % lane.count, (lane.me - 1) % lane.count
        if after != first:
            wide = accumulator(block.dtype).itemsize
            traffic[f"{lane.name(lane.me)}->{lane.name(after)}"] += block.size * wide
        if lane.me != first:
            traffic[f"{lane.name(lane.me)}->{lane.name(before)}"] += block.nbytes
        return traffic

    def _own(
        self, share: Share, rows: list[Row], scratch: Scratch
    ) -> tuple[list[Row], Sequence[float] | None]:
        """Return what is added to a partial sum: rows of the accumulator's dtype."""
        if self._inside is not None and len(rows) > 1:
            return [share.row(share.own_sum(scratch, self._inside))], None
        wide = accumulator(share.like[0].dtype)
        if wide == share.like[0].dtype:
            return rows, share.weights
        widened = []
        for row in rows:
            widened.append(scratch.row(host(), row, wide))
            host().ops.convert(widened[-1], row, threads=share.threads)
        return widened, share.weights


class _Link(Flight):
    """What one machine has yet to do with a block: wait for the total, and pass it on."""

    def __init__(
        self,
        lane: Lane,
        share: Share,
        scratch: Scratch,
        total: Array,
        arriving: Sequence[Under],
        leaving: list[Under],
        to: Sequence[int],
    ) -> None:
        self._lane, self._share, self._scratch, self._total = lane, share, scratch, total
        self._arriving, self._leaving, self._to = arriving, leaving, to

    def finish(self, into: Sequence[Row]) -> None:
        lane, share = self._lane, self._share
        lane.wait(self._arriving)
        self._leaving += [lane.send(to, self._total, TOTALS) for to in self._to]
        store(into, share.row(self._total), share.threads)
        lane.let_go(self._leaving, self._scratch)
