"""Parts: which elements of a row of arrays are whose, where several share one update.

    weights      [ w0      ][ w1 ][ w2          ]
    part 0       ──────────────
    part 1                       ────────────────

The arrays are taken as one long row, which is cut into parts of equal length. Every array is cut
where 64 bytes of it begin, so that no two who write share a cache line.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

LINE = 64  # bytes


class Piece(NamedTuple):
    """The elements from `first` to just before `end` of the array with a number."""

    array: int
    first: int
    end: int


def cut(arrays: Sequence[tuple[int, int]], parts: int) -> list[list[Piece]]:
    """Return the pieces of each part; `arrays` has a number of elements and the bytes of each.

    Every element is in one part, and a part has no empty pieces.
    """
    lines = [-(-size * itemsize // LINE) for size, itemsize in arrays]
    borders = [sum(lines) * part // parts for part in range(parts + 1)]
    pieces: list[list[Piece]] = [[] for _ in range(parts)]
    start = 0  # the array's first line in the row
    for i, (size, itemsize) in enumerate(arrays):
        for part, (low, high) in enumerate(pairwise(borders)):
            first = max(low - start, 0) * LINE // itemsize
            end = min((high - start) * LINE // itemsize, size)
            if first < end:
                pieces[part].append(Piece(i, first, end))
        start += lines[i]
    return pieces
