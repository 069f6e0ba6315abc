"""Passing: rows go to other ranks as they are, nothing is added up.

    broadcast     from one rank to all       rank 0  a         ──►   a     a     a
    all_gather    from all ranks to all      rank k  k's rows  ──►   all   all   all

Rows are bytes here, so any dtypes will do. They go in blocks that are small enough for the carrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.carrier import ROOM, Carrier
from minidist.comm.cutting import Piece, lengths, runs_of
from minidist.comm.row import Row
from minidist.device import Array

BYTE = np.dtype(np.uint8)


def broadcast(carrier: Carrier, root: int, rows: Sequence[Row]) -> None:
    """Copy the rows of one member into those of all the others, which are of the same kind."""
    flats = [as_bytes(row) for row in rows]
    for flat in flats:
        for block in _blocks(flat, ROOM):
            size = len(block)
            out = size if carrier.me == root else 0
            into = [size if member == root else 0 for member in range(len(carrier.members))]
            with carrier.round(out, into, BYTE, "broadcast") as given:
                if carrier.me == root:
                    block.write(given.desk(root))
                given.hand_over()
                if carrier.me != root:
                    block.read(given.take(root))


def all_gather(carrier: Carrier, every: Sequence[Sequence[Row]]) -> None:
    """Fill the rows of all members but this one, which brings its own."""
    ways = [[block for row in rows for block in _blocks(as_bytes(row), ROOM)] for rows in every]
    for turn in range(max(map(len, ways))):
        blocks = [way[turn] if turn < len(way) else _Block([], []) for way in ways]
        into = [len(block) for block in blocks]
        with carrier.round(into[carrier.me], into, BYTE, "all_gather") as given:
            blocks[carrier.me].write(given.desk(carrier.me))
            given.hand_over()
            for member, block in enumerate(blocks):
                if member != carrier.me:
                    block.read(given.take(member))


def as_bytes(row: Row) -> Row:
    """Return the memory of a row's arrays, which must be contiguous."""
    return Row([array.reshape(-1).view(BYTE) for array in row], row.devices)


class _Block:
    """Some bytes of a row that go at a time."""

    def __init__(self, row: Sequence[Array], pieces: Sequence[Piece]) -> None:
        self._parts = [row[i][a:b] for i, a, b in pieces]

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def write(self, desk: Array) -> None:
        start = 0
        for part in self._parts:
            desk[start : start + len(part)] = part
            start += len(part)

    def read(self, desk: Any) -> None:
        start = 0
        for part in self._parts:
            part[...] = desk[start : start + len(part)]
            start += len(part)


def _blocks(row: Row, capacity: int) -> list[_Block]:
    pieces = [(i, 0, size) for i, size in enumerate(lengths(row)) if size]
    count = -(-sum(lengths(row)) // capacity)
    return [_Block(row, run) for run in runs_of(pieces, count)] if count else []
