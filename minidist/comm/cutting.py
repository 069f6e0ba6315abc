"""Cutting: which elements of a row's tensors go together in one part of it.

A plan has for each part a list of pieces, each (number of the tensor, first element, end). It
depends on the tensors' lengths alone, so it is made once for all replicas and steps.

    tensors of 6, 2 and 4 elements      [0 1 2 3 4 5] [0 1] [0 1 2 3]
    shares(…, 2)                        [0 1 2] [0] [0 1]  │  [3 4 5] [1] [2 3]
    runs(…, 2)                          [0 1 2 3 4 5]      │  [0 1] [0 1 2 3]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from minidist.comm.row import Row
from minidist.device import Array
from minidist.errors import ShapeError

Piece = tuple[int, int, int]
Plan = Sequence[Sequence[Piece]]


@lru_cache
def shares(sizes: tuple[int, ...], count: int) -> Plan:
    """Part k has of each tensor of L elements those from ⌊kL/count⌋ to ⌊(k+1)L/count⌋.

    So in which part an element is depends on nothing but its place in its tensor.
    """
    return [
        [(i, size * k // count, size * (k + 1) // count) for i, size in enumerate(sizes)]
        for k in range(count)
    ]


@lru_cache
def runs(sizes: tuple[int, ...], count: int) -> Plan:
    """Part k has the elements from ⌊kT/count⌋ to ⌊(k+1)T/count⌋ of all T in the row, in a run.

    So it has few pieces, but in which part an element is depends on the whole row.
    """
    starts = [0, *accumulate(sizes)]
    bounds = [starts[-1] * k // count for k in range(count + 1)]
    return [
        [
            (i, max(a - start, 0), min(b - start, size))
            for i, (start, size) in enumerate(zip(starts, sizes, strict=False))
            if start < b and a < start + size
        ]
        or [(0, 0, 0)]
        for a, b in pairwise(bounds)
    ]


def runs_of(pieces: Sequence[Piece], count: int, step: int = 1) -> Plan:
    """Cut pieces in `count` runs of nearly as many elements, some of which may be empty.

    All runs but the last have a multiple of `step` elements.
    """
    total = sum(b - a for _, a, b in pieces)
    bounds = [total * k // count // step * step for k in range(count)] + [total]
    plan: list[list[Piece]] = []
    for first, end in pairwise(bounds):
        run, start = [], 0
        for i, a, b in pieces:
            low, high = max(first, start), min(end, start + b - a)
            if low < high:
                run.append((i, a + low - start, a + high - start))
            start += b - a
        plan.append(run)
    return plan


def extent(pieces: Sequence[Piece]) -> int:
    """Return how many elements some pieces have."""
    return sum(b - a for _, a, b in pieces)


def lengths(row: Row) -> tuple[int, ...]:
    """Return how many elements each tensor has."""
    return tuple(array.size for array in row)


def cut(row: Row, plan: Plan) -> list[Row]:
    """Return the parts of a row: views of its tensors, flat."""
    flats = [_flat(array) for array in row]
    return [
        Row([flats[i][a:b] for i, a, b in pieces], [row.devices[i] for i, _, _ in pieces])
        for pieces in plan
    ]


def joined(rows: Iterable[Row]) -> Row:
    """Return several rows as one."""
    rows = list(rows)
    return Row(
        [array for row in rows for array in row],
        [device for row in rows for device in row.devices],
    )


def _flat(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise ShapeError(
            f"all_reduce: an array of shape {list(array.shape)} is not contiguous; copy it first"
        )
    return array.reshape(-1)
