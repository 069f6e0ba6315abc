"""Tiered: communication between the replicas of several processes, in two tiers.

    inside    the ranks of one machine, through memory that they share     exchange.py, boards.py
    between   the machines, by messages                                     between.py, letters.py

    machine 0   r0 r1 ──► sum ──┐             ┌──► total ──► r0 r1
                                ├── between ──┤
    machine 1   r2 r3 ──► sum ──┘             └──► total ──► r2 r3

A spec without a slash is an order over all replicas, and gives the bits of one machine with as many
of them, wherever they are. `inside/between` sums in each machine by the order of the first, and
over the machines' sums by the second.

Every verb begins with a meeting: the ranks say what they are about to do, with which shapes, and
whatever else must be the same. So a mistake is named before anything moves.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from minidist import observe
from minidist.comm.base import Communicator
from minidist.comm.between import Alone, Between
from minidist.comm.boards import Boards, carrier
from minidist.comm.chain import Chain
from minidist.comm.collective import Collective
from minidist.comm.doubling import Doubling
from minidist.comm.exchange import Brought, Exchange
from minidist.comm.fields import Fields, Spot
from minidist.comm.flat import Kind
from minidist.comm.gathered import Gathered
from minidist.comm.lane import Lane
from minidist.comm.machines import Machines
from minidist.comm.orders import check
from minidist.comm.passing import all_gather, broadcast
from minidist.comm.peers import Ranks
from minidist.comm.row import Row, columns, kinds, tell
from minidist.device import Device, cpu_foreign, host
from minidist.dtypes import as_dtype
from minidist.errors import UsageError
from minidist.traffic import Outline, Places, Traffic


class Tiered(Communicator):
    """A communicator across ranks.

    All peers must make it, in the same order as others.
    counts: how many replicas each peer has. inside: the order of a sum, over all replicas or, with
    `between`, over those of a machine. between, shards: how machines' sums are summed. apart: let
    every rank count as a machine.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        peers: Ranks,
        counts: Sequence[int],
        inside: str,
        between: str | None = None,
        shards: int = 1,
        *,
        apart: bool = False,
    ) -> None:
        self.devices = tuple(devices)
        self._peers = self._ranks = peers
        self._counts = tuple(counts)
        self._inside = inside
        self._machines = Machines.of(peers.hosts, peers.me, apart=apart)
        if between is None and inside != "serial":  # who adds must have the rows of all replicas
            self._machines = Machines((tuple(range(peers.count)),), peers.me)
        self._between = self._choose(between, shards)
        self.order = self._between.order
        here = self._machines.here
        joined = carrier(peers, here) if len(here) > 1 else None
        turning = between == "xring" and self._machines.count > 1
        self._exchange = Exchange(joined, self._between, max(counts), chunks=turning)
        self._fields = None
        alone = len(here) == peers.count == self.replicas
        if isinstance(joined, Boards) and alone and self.devices[0].kind != "cuda":
            self._fields = Fields(joined)

    def _choose(self, between: str | None, shards: int) -> Between:
        """Return how the machines come together."""
        if self._machines.count == 1:
            return Alone(self._inside)
        lane = Lane(self._ranks, self._machines.lane)
        match between:
            case "xring":
                return Chain(lane, self._inside)
            case "rechd":
                return Doubling(lane, self._inside)
            case "pscpu":
                return Gathered(lane, self._inside, shards)
            case "collective":
                return Collective(lane, self._inside)
            case _:
                return Chain(lane)

    @property
    def replicas(self) -> int:
        return sum(self._counts)

    @property
    def first(self) -> int:
        return sum(self._counts[: self._ranks.me])

    def _heard(
        self, sources: Sequence[Row], weights: Sequence[float] | None
    ) -> tuple[Sequence[Row], Sequence[float] | None]:
        """All replicas of this rank bring a row, and the weights are those of all ranks'."""
        own = self._counts[self._ranks.me]
        if len(sources) != own:
            raise UsageError(f"all_reduce: {len(sources)} rows for the {own} replicas of this rank")
        if weights is not None and len(weights) != self.replicas:
            raise UsageError(f"all_reduce: {len(weights)} weights for {self.replicas} replicas")
        return sources, weights

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        like = sources[0]
        dtypes = list(dict.fromkeys(array.dtype for array in like))
        for dtype in dtypes:
            check(dtype, weights, scale)
        what = f"all_reduce {kinds(like)} times {weights} and {scale} in {self.order} order"
        spot = self._find(destinations, weights)
        stamp = b"" if spot is None else spot.stamp
        direct = all(each == stamp for each in self._ranks.meet(what, stamp))
        for dtype in dtypes:
            given, wanted, own = sources, destinations, like
            if len(dtypes) > 1:
                members = [i for i, array in enumerate(like) if array.dtype == dtype]
                given, wanted = columns(sources, members), columns(destinations, members)
                own = like.part(members)
            brought = self._brought(given, own, weights)
            if observe.counting:
                tell([host()] * len(own), wanted, brought.rows)
            if self._fields is not None and spot is not None and direct:
                here = spot if own is like else spot.part(members)
                plan = self._exchange.plan(own)
                self._fields.sum(here, given[0], weights, plan, self.order, scale, threads)
                continue
            with _at_host(brought.rows, wanted) as (rows, into):
                self._exchange.sum(brought._replace(rows=rows), into, scale, threads)

    def _find(self, rows: Sequence[Row], weights: Sequence[float] | None) -> Spot | None:
        """Return where the only destination lies in the window, if all replicas have a say."""
        if self._fields is None or len(rows) > 1 or (weights is not None and not all(weights)):
            return None
        return self._fields.find(rows[0])

    def allocate(self, kinds: Sequence[tuple[tuple[int, ...], Any]]) -> Row:
        made = None
        if self._fields is not None:
            made = self._fields.make(self.devices[0], [Kind(*kind) for kind in kinds])
        return super().allocate(kinds) if made is None else made

    def _brought(
        self, sources: Sequence[Row], like: Row, weights: Sequence[float] | None
    ) -> Brought:
        """Leave out the replicas of weight 0: they have no say, not even with a NaN."""
        if weights is None:
            counts = [self._counts[peer] for peer in self._machines.here]
            return Brought(sources, like, counts, None, range(self._machines.count))
        ends = list(accumulate(self._counts, initial=0))
        by_peer = [weights[a:b] for a, b in pairwise(ends)]
        own = by_peer[self._ranks.me]
        here = [by_peer[peer] for peer in self._machines.here]
        return Brought(
            rows=[row for row, weight in zip(sources, own, strict=True) if weight],
            like=like,
            counts=[sum(map(bool, theirs)) for theirs in here],
            weights=[weight for theirs in here for weight in theirs if weight],
            saying=[
                m
                for m, ranks in enumerate(self._machines.ranks)
                if any(any(by_peer[peer]) for peer in ranks)
            ],
        )

    def _peer_of(self, replica: int) -> int:
        return bisect_right(list(accumulate(self._counts)), replica)

    # --- rows as they are

    def _broadcast_rows(self, rows: Sequence[Row], root: int) -> None:
        self._ranks.meet(f"broadcast {kinds(rows[0])} from replica {root}")
        peer = self._peer_of(root)
        local = root - sum(self._counts[:peer]) if peer == self._ranks.me else 0
        sent, got = ([rows[local]], []) if peer == self._ranks.me else ([], [rows[local]])
        with _at_host(sent, got) as (given, wanted):
            way = carrier(self._ranks, range(self._ranks.count))
            broadcast(way, peer, [*given, *wanted])
        super()._broadcast_rows(rows, local)

    def _gather_rows(self, sources: Sequence[Row]) -> list[Row]:
        peers, device = self._ranks, self.devices[0]
        kinds = [[(array.shape, str(array.dtype)) for array in row] for row in sources]
        every: list[list[Row]] = []
        for peer, theirs in enumerate(peers.meet("all_gather", json.dumps(kinds).encode())):
            if peer == peers.me:
                every.append(list(sources))
                continue
            rows = [
                [device.allocate(shape, as_dtype(dtype)) for shape, dtype in row]
                for row in json.loads(theirs)
            ]
            every.append([Row.on(device, row) for row in rows])
        others = [row for peer, rows in enumerate(every) if peer != peers.me for row in rows]
        with _at_host(sources, others) as (given, wanted):
            arriving = iter(wanted)
            at_host = [
                list(given) if peer == peers.me else [next(arriving) for _ in rows]
                for peer, rows in enumerate(every)
            ]
            all_gather(carrier(peers, range(peers.count)), at_host)
        return [row for rows in every for row in rows]

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        """The host reads each replica's row and writes each destination; for the rest see there."""
        counts = [self._counts[peer] for peer in self._machines.here]
        return self._moved(tensors, destinations, self.devices, counts)

    def _moved(
        self,
        tensors: Sequence[Outline],
        destinations: Sequence[Places],
        brings: Sequence[Device],
        counts: Sequence[int],
    ) -> Traffic:
        """Return what moves when these devices bring rows, and of each rank here so many."""
        traffic = Traffic()
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            row = [tensors[i] for i in members]
            here = [host()] * len(row)
            for device in brings:
                traffic.each([device] * len(row), here, row)
            for places in destinations:
                traffic.each(here, [places[i] for i in members], row)
            machines = self._machines.count
            traffic.update(self._exchange.predicted_bytes(row, counts, machines))
        return traffic


@contextmanager
def _at_host(
    sources: Sequence[Row], destinations: Sequence[Row]
) -> Iterator[tuple[Sequence[Row], Sequence[Row]]]:
    """Give rows in the host's memory in place of those of GPUs, and bring back what they get."""
    with cpu_foreign.brought(destinations, sources) as (wanted, given):
        if wanted is destinations:
            yield sources, destinations
        else:
            yield [Row.on(host(), row) for row in given], [Row.on(host(), row) for row in wanted]
