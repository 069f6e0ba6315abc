"""Gathered: pscpu between machines. One of them gets the sums of all, and gives out the total.

    machine 0   S0 ──┐                     ┌──► total
    machine 1        S1 ── (S0 + S1) + S2 ─┤    (the server of this block)
    machine 2   S2 ──┘                     └──► total

With shards#k blocks go to the first k machines by turns, so that k of them serve at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.between import Between, Flight, Share
from minidist.comm.lane import PARTS, TOTALS, Lane, Under
from minidist.comm.orders import accumulator, add, scaled, store
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.device import Array, host
from minidist.traffic import Outline, Traffic


class Gathered(Between):
    """A sum at a server. inside: the order of each machine's own sum."""

    def __init__(self, lane: Lane, inside: str, shards: int) -> None:
        self._lane = lane
        self._inside = inside
        self._servers = min(shards, lane.count)
        self.order = f"{inside}/serial"
        self.lag = 2

    def begin(self, share: Share) -> Flight:
        lane, scratch = self._lane, Scratch()
        server = share.number % self._servers
        own = share.own_sum(scratch, self._inside)
        total = scratch.flat(host(), len(own), share.like[0].dtype)
        sums, arriving, leaving = {lane.me: own}, [], []
        if server == lane.me:
            for m in share.saying:
                if m != lane.me:
                    sums[m] = scratch.flat(host(), len(own), own.dtype)
                    arriving.append(lane.receive(m, sums[m], PARTS))
        else:
            if lane.me in share.saying:
                leaving.append(lane.send(server, own, PARTS))
            arriving.append(lane.receive(server, total, TOTALS))
        return _Serving(lane, share, scratch, server, sums, total, arriving, leaving)

    def settle(self) -> None:
        self._lane.settle()

    def predicted_bytes(self, block: Outline, number: int, first: int) -> Traffic:
        """The server sends the total to all others, and each of them its sum to the server."""
        lane, traffic, server = self._lane, Traffic(), number % self._servers
        me = lane.name(lane.me)
        for m in range(lane.count):
            if server == lane.me != m:
                traffic[f"{me}->{lane.name(m)}"] += block.nbytes
            elif server == m != lane.me:
                traffic[f"{me}->{lane.name(m)}"] += block.size * accumulator(block.dtype).itemsize
        return traffic


class _Serving(Flight):
    def __init__(
        self,
        lane: Lane,
        share: Share,
        scratch: Scratch,
        server: int,
        sums: dict[int, Array],
        total: Array,
        arriving: Sequence[Under],
        leaving: list[Under],
    ) -> None:
        self._lane, self._share, self._scratch, self._server = lane, share, scratch, server
        self._sums, self._total, self._arriving, self._leaving = sums, total, arriving, leaving

    def finish(self, into: Sequence[Row]) -> None:
        lane, share = self._lane, self._share
        lane.wait(self._arriving)
        if self._server == lane.me:
            rows = [Row.on(host(), [self._sums[m]]) for m in share.saying]
            add("serial", rows[:1], rows, threads=share.threads)
            scaled(rows[0], share.scale, share.threads)
            store([Row.on(host(), [self._total])], rows[0], share.threads)
            self._leaving += [
                lane.send(m, self._total, TOTALS) for m in range(lane.count) if m != lane.me
            ]
        store(into, share.row(self._total), share.threads)
        lane.let_go(self._leaving, self._scratch)
