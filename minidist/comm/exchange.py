"""Exchange: on each machine every rank adds up a share of the elements, for all ranks there.

Shares A B of the elements, replicas 0 1 in one rank and 2 3 in the other:

                has          rows to who adds      adds            totals to all
    rank 0   A0 A1 B0 B1  │  B0 B1 ──►          │  A = A0+1+2+3  │  A  B
    rank 1   A2 A3 B2 B3  │        ◄── A2 A3    │  B = B0+1+2+3  │  A  B

Who adds has the rows of all replicas before it, so the order can be any; and where there are other
machines, it brings its share together with theirs (between.py). The elements go in blocks that are
small enough for the carrier, one after the other; in which of them an element is changes no bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.between import Between, Flight, Share
from minidist.comm.carrier import ROOM, Carrier
from minidist.comm.cutting import Plan, cut, extent, lengths, runs_of, shares
from minidist.comm.row import Row
from minidist.comm.scratch import in_a_row
from minidist.device import Array
from minidist.errors import UsageError
from minidist.traffic import Outline, Traffic

STEP = 64  # elements: shares begin where a cache line begins, if their tensor does


class Block(NamedTuple):
    """Elements that travel together: the pieces of each rank's share, and their chunk's number."""

    plan: Plan
    first: int


class Brought(NamedTuple):
    """What is summed.

    rows: those of this rank. like: one of the kind. counts: how many each rank of the machine
    brings. weights: of all of these. saying: the numbers of the machines that bring any.
    """

    rows: Sequence[Row]
    like: Row
    counts: Sequence[int]
    weights: Sequence[float] | None
    saying: Sequence[int]


class Exchange:
    """All-reduce over the ranks that a carrier joins, and over machines.

    carrier: None where this rank is alone on its machine. most: how many rows a rank of any machine
    may bring; all machines must cut the same blocks, whoever has a say. chunks: whether each tensor
    is cut in as many chunks as there are machines that bring something.
    """

    def __init__(
        self, carrier: Carrier | None, between: Between, most: int, *, chunks: bool = False
    ) -> None:
        self._carrier = carrier
        self._between = between
        self._most = most
        self._chunks = chunks
        self._ranks = 1 if carrier is None else len(carrier.members)
        self._me = 0 if carrier is None else carrier.me

    def sum(
        self, brought: Brought, destinations: Sequence[Row], scale: float, threads: int
    ) -> None:
        """Put the sum over all rows into the destinations."""
        sizes, dtype = lengths(brought.like), brought.like[0].dtype
        under: deque[tuple[_Turn, Flight | None]] = deque()
        blocks = self._blocks(sizes, dtype, len(brought.saying))
        for number, block in enumerate(blocks):
            turn = _Turn(self, block, brought, destinations)
            under.append((turn, turn.begin(number, sizes, scale, threads)))
            if len(under) > self._between.lag:
                turn, flight = under.popleft()
                turn.finish(flight)
        for turn, flight in under:
            turn.finish(flight)
        self._between.settle()

    def predicted_bytes(
        self, tensors: Sequence[Outline], counts: Sequence[int], machines: int
    ) -> Traffic:
        """Return what goes between ranks for tensors of one dtype, if all replicas bring them."""
        traffic, carrier, me = Traffic(), self._carrier, self._me
        dtype = tensors[0].dtype
        sizes = tuple(tensor.size for tensor in tensors)
        for number, block in enumerate(self._blocks(sizes, dtype, machines)):
            shares = [extent(pieces) for pieces in block.plan]
            if carrier is not None:
                out = [share * counts[me] for share in shares]
                into = [shares[me] * count for count in counts]
                traffic.update(carrier.predicted_bytes(out, into, dtype))
                traffic.update(carrier.predicted_bytes(shares[me], shares, dtype))
            if shares[me]:
                own = Outline(shares[me], dtype)
                traffic.update(self._between.predicted_bytes(own, number, block.first))
        return traffic

    def plan(self, like: Row) -> Plan:
        """Return one share for each rank, in no blocks: for rows that no carrier carries."""
        return _shares(lengths(like), self._ranks)

    def _blocks(
        self, sizes: tuple[int, ...], dtype: np.dtype[Any], machines: int
    ) -> Sequence[Block]:
        """Return the blocks for tensors of these sizes, of so many machines that bring any."""
        room = self._between.room
        if self._carrier is not None:
            room = ROOM // self._most
        share = room // dtype.itemsize - 2 * STEP
        if share < STEP:
            raise UsageError(f"all_reduce: {self._most} replicas in a process are too many")
        return _blocks(sizes, machines if self._chunks else 1, self._ranks, share)


class _Turn:
    """One block's way through the machine."""

    def __init__(
        self, exchange: Exchange, block: Block, brought: Brought, destinations: Sequence[Row]
    ) -> None:
        self._carrier, self._between = exchange._carrier, exchange._between
        self._me, self._block, self._brought = exchange._me, block, brought
        self._wanted = [cut(row, block.plan) for row in destinations]
        self._sizes = [extent(pieces) for pieces in block.plan]
        self._dtype = brought.like[0].dtype
        self._rows = ExitStack()  # the round in which the others' rows come, until they are summed

    def begin(self, number: int, sizes: Sequence[int], scale: float, threads: int) -> Flight | None:
        """Let who adds this rank's share get the others' rows, and begin to sum."""
        me, plan, brought = self._me, self._block.plan, self._brought
        rows = [cut(row, plan) for row in brought.rows]
        collected = [row[me] for row in rows] if self._carrier is None else self._collect(rows)
        if not self._sizes[me]:
            return None
        return self._between.begin(
            Share(
                rows=collected,
                weights=brought.weights,
                saying=brought.saying,
                like=cut(brought.like, plan)[me],
                at=plan[me],
                sizes=sizes,
                number=number,
                first=self._block.first,
                scale=scale,
                threads=threads,
                into=[row[me] for row in self._wanted] if self._carrier is None else None,
            )
        )

    def finish(self, flight: Flight | None) -> None:
        """Have this rank's share summed, and let all get all of them."""
        me, sizes = self._me, self._sizes
        into = [row[me] for row in self._wanted]
        if self._carrier is None:
            if flight is not None:
                flight.finish(into)
            return
        with self._rows, self._carrier.round(sizes[me], sizes, self._dtype, "sum") as totals:
            if flight is not None:
                desk = in_a_row(totals.desk(me), lengths(into[0]))
                flight.finish([*into, desk])
            totals.hand_over()
            for member, size in enumerate(sizes):
                if member != me and size:
                    _spread(totals.take(member), [row[member] for row in self._wanted])

    def _collect(self, rows: Sequence[Sequence[Row]]) -> list[Row]:
        """Return all rows' parts for this rank's share; hand over those for the others'."""
        me, sizes, counts = self._me, self._sizes, self._brought.counts
        assert self._carrier is not None
        out = [0 if member == me else size * len(rows) for member, size in enumerate(sizes)]
        into = [sizes[me] * count for count in counts]
        collected: list[Row] = []
        given = self._rows.enter_context(self._carrier.round(out, into, self._dtype, "sum"))
        for member, size in enumerate(sizes):
            if member != me and size:
                _pack(given.desk(member), [row[member] for row in rows])
        given.hand_over()
        for member, count in enumerate(counts):
            if member == me:
                collected += [row[me] for row in rows]
            elif sizes[me] and count:
                flat = given.take(member)
                lengths = [b - a for _, a, b in self._block.plan[me]]
                for k in range(count):
                    part = flat[k * sizes[me] : (k + 1) * sizes[me]]
                    collected.append(in_a_row(part, lengths))
        return collected


@lru_cache
def _shares(sizes: tuple[int, ...], ranks: int) -> Plan:
    return runs_of([(i, 0, size) for i, size in enumerate(sizes)], ranks, STEP)


@lru_cache
def _blocks(sizes: tuple[int, ...], chunks: int, ranks: int, share: int) -> Sequence[Block]:
    """Return blocks of about `share` elements for each rank; those of the chunks by turns.

    It may be 2·STEP more, since all runs but the last have a multiple of STEP.
    """
    by_chunk = []
    for first, pieces in enumerate(shares(sizes, chunks)):
        count = -(-extent(pieces) // (share * ranks))
        by_chunk.append(
            [
                Block(runs_of(run, ranks, STEP), first)
                for run in (runs_of(pieces, count, STEP * ranks) if count else [])
            ]
        )
    return [block for turn in zip_longest(*by_chunk) for block in turn if block is not None]


def _pack(desk: Array, rows: Sequence[Row]) -> None:
    start = 0
    for row in rows:
        for array in row:
            desk[start : start + array.size] = array
            start += array.size


def _spread(flat: Array, rows: Sequence[Row]) -> None:
    for row in rows:
        start = 0
        for array in row:
            array[...] = flat[start : start + array.size]
            start += array.size
