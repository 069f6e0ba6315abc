"""Doubling: rechd between machines, by messages. halving.py has the picture.

In each step a machine and its mate exchange halves of what both are still busy with, and add; then
the totals go back the same way, twice as much each time. Where the machines are no power of two,
some stand for two: the second gives the first its sum before, and gets the total after.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.between import Between, Flight, Share
from minidist.comm.lane import PARTS, TOTALS, Lane, Under
from minidist.comm.orders import accumulator, add, scaled, store
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.comm.tree import twigs
from minidist.device import Array, host
from minidist.traffic import Outline, Traffic


class Doubling(Between):
    """Recursive halving and doubling. inside: the order of each machine's own sum."""

    def __init__(self, lane: Lane, inside: str) -> None:
        self._lane = lane
        self._inside = inside
        self.order = f"{inside}/tree"

    def begin(self, share: Share) -> Flight:
        return _Exchanging(self._lane, share, self._inside)

    def settle(self) -> None:
        self._lane.settle()

    def predicted_bytes(self, block: Outline, number: int, first: int) -> Traffic:
        """A half goes to each mate, and what was kept of it comes back to him as a total."""
        lane, traffic = self._lane, Traffic()
        wide = accumulator(block.dtype).itemsize
        groups = twigs(range(lane.count))
        place = next((p for p, group in enumerate(groups) if group[0] == lane.me), None)
        me = lane.name(lane.me)
        if place is None:  # another one stands for this machine
            other = next(group[0] for group in groups if lane.me in group)
            traffic[f"{me}->{lane.name(other)}"] += block.size * wide
            return traffic
        start, end = 0, block.size
        for step in range(len(groups).bit_length() - 1):
            mate = f"{me}->{lane.name(groups[place ^ 1 << step][0])}"
            middle = (start + end) // 2
            upper = place >> step & 1
            traffic[mate] += (middle - start if upper else end - middle) * wide
            start, end = (middle, end) if upper else (start, middle)
            traffic[mate] += (end - start) * block.dtype.itemsize
        for second in groups[place][1:]:
            traffic[f"{me}->{lane.name(second)}"] += block.nbytes
        return Traffic({link: n for link, n in traffic.items() if n})


class _Exchanging(Flight):
    def __init__(self, lane: Lane, share: Share, inside: str) -> None:
        self._lane, self._share = lane, share
        self._scratch = Scratch()
        self._own = share.own_sum(self._scratch, inside)
        self._total = self._scratch.flat(host(), len(self._own), share.like[0].dtype)
        self._leaving: list[Under] = []

    def finish(self, into: Sequence[Row]) -> None:
        lane, share = self._lane, self._share
        groups = [[share.saying[i] for i in group] for group in twigs(range(len(share.saying)))]
        place = next((p for p, group in enumerate(groups) if group[0] == lane.me), None)
        if place is None:
            first = next((g[0] for g in groups if lane.me in g), groups[0][0])
            if lane.me in share.saying:
                self._leaving.append(lane.send(first, self._own, PARTS))
            lane.wait([lane.receive(first, self._total, TOTALS)])
        else:
            for second in groups[place][1:]:
                self._add(second, slice(None), after=True)
            self._halve_and_double([group[0] for group in groups], place)
            others = [m for m in range(lane.count) if m not in share.saying] if place == 0 else []
            for m in [*groups[place][1:], *others]:
                self._leaving.append(lane.send(m, self._total, TOTALS))
        store(into, share.row(self._total), share.threads)
        lane.let_go(self._leaving, self._scratch)

    def _halve_and_double(self, firsts: Sequence[int], place: int) -> None:
        lane, own, total = self._lane, self._own, self._total
        kept = [(0, len(own))]  # after each step, from which element to which
        steps = len(firsts).bit_length() - 1
        for step in range(steps):
            mate = firsts[place ^ 1 << step]
            start, end = kept[-1]
            middle = (start + end) // 2
            lower, upper = (start, middle), (middle, end)
            keep, give = (upper, lower) if place >> step & 1 else (lower, upper)
            self._leaving.append(lane.send(mate, own[slice(*give)], PARTS))
            self._add(mate, slice(*keep), after=not place >> step & 1)
            kept.append(keep)
        block = slice(*kept[-1])
        done = Row.on(host(), [own[block]])
        scaled(done, self._share.scale, self._share.threads)
        store([Row.on(host(), [total[block]])], done, self._share.threads)
        for step in reversed(range(steps)):
            mate = firsts[place ^ 1 << step]
            (start, end), (first, last) = kept[step], kept[step + 1]
            theirs = slice(start, first) if start < first else slice(last, end)
            self._leaving.append(lane.send(mate, total[first:last], TOTALS))
            lane.wait([lane.receive(mate, total[theirs], TOTALS)])

    def _add(self, machine: int, where: slice, *, after: bool) -> None:
        """Add what a machine sends, behind what is here or before it."""
        here = self._own[where]
        theirs = self._scratch.flat(host(), len(here), here.dtype)
        self._lane.wait([self._lane.receive(machine, theirs, PARTS)])
        rows: list[Array] = [here, theirs] if after else [theirs, here]
        own = Row.on(host(), [here])
        add("serial", [own], [Row.on(host(), [row]) for row in rows], threads=self._share.threads)
