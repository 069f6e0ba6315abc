"""Orders: rows that one device reaches, added up in the order of a class.

    serial   ((g0 + g1) + g2) + g3
    ring     ((g1 + g2) + g3) + g0  for chunk 1 of a tensor: it begins with replica 1    (ring.py)
    tree     (g0 + g1) + (g2 + g3)                                                       (tree.py)

Where the sum over several ranks is taken is a matter of who reaches what; in which order, of the
class alone. float16 and bfloat16 are added up in float32 and rounded once; integers wrap around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minidist.comm.cutting import Piece
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.comm.tree import halves
from minidist.device import host
from minidist.dtypes import is_narrow
from minidist.errors import ShapeError

FLOAT32 = np.dtype(np.float32)


def check(dtype: np.dtype[Any], weights: Sequence[float] | None, scale: float) -> None:
    """Raise ShapeError for what cannot be added up, or not with these."""
    if dtype.char in "fd" or is_narrow(dtype):
        return
    if dtype.kind not in "iu" or weights is not None or scale != 1:
        raise ShapeError(
            f"all_reduce: {dtype} cannot be added up"
            + (" with weights or a scale" if dtype.kind in "iu" else "")
            + "; convert it with ops.cast"
        )


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which sums of another one are kept until they are complete."""
    return FLOAT32 if is_narrow(dtype) else dtype


def add(
    order: str,
    destinations: Sequence[Row],
    sources: Sequence[Row],
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    *,
    at: Sequence[Piece] = (),
    sizes: Sequence[int] = (),
    threads: int,
) -> None:
    """Store Σ(w_i·x_i)·scale in every destination, in the order of a class.

    Rows are of one dtype, or the destinations of its accumulator. A destination may be the very
    same as a source. at, sizes: for "ring", of which tensors of which sizes the arrays are pieces.
    """
    if sources[0] and sources[0][0].dtype.kind in "iu":
        _whole(destinations, sources)
    elif len(sources) < 3 or order == "serial":
        host().ops.sum(destinations, sources, weights=weights, scale=scale, threads=threads)
    elif order == "tree":
        with Scratch() as scratch:
            total = _total(range(len(sources)), sources, weights, scale, scratch, threads)
            store(destinations, total, threads)
    else:
        for first, cuts in _chunks(at, sizes, len(sources)):
            turned = [*sources[first:], *sources[:first]]
            host().ops.sum(
                [_parts(row, cuts) for row in destinations],
                [_parts(row, cuts) for row in turned],
                weights=weights and [*weights[first:], *weights[:first]],
                scale=scale,
                threads=threads,
            )


def store(destinations: Sequence[Row], total: Row, threads: int) -> None:
    """Copy a sum into every destination, rounded once where these are narrower."""
    same = not total or total[0].dtype == destinations[0][0].dtype
    if same and (not total or total[0].dtype.char in "fd"):
        host().ops.sum(destinations, [total], threads=threads)
        return
    for destination in destinations:
        host().ops.convert(destination, total, threads=threads)


def scaled(total: Row, scale: float, threads: int) -> None:
    """Multiply a sum by a scale, in place."""
    if scale != 1:
        host().ops.sum([total], [total], scale=scale, threads=threads)


def _total(
    members: Sequence[int],
    sources: Sequence[Row],
    weights: Sequence[float] | None,
    scale: float,
    scratch: Scratch,
    threads: int,
) -> Row:
    """Return the sum of some sources as a tree, in the accumulator's dtype."""
    total = scratch.row(host(), sources[0], accumulator(sources[0][0].dtype))
    if len(members) <= 2:
        parts = [sources[i] for i in members]
        own = weights and [weights[i] for i in members]
        host().ops.sum([total], parts, weights=own, scale=scale, threads=threads)
    else:
        sums = [_total(half, sources, weights, 1.0, scratch, threads) for half in halves(members)]
        host().ops.sum([total], sums, scale=scale, threads=threads)
    return total


def _chunks(
    at: Sequence[Piece], sizes: Sequence[int], n: int
) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Give for each chunk of n which elements, from first to end, of which of the arrays it has."""
    for c in range(n):
        cuts = []
        for k, (i, a, b) in enumerate(at):
            low, high = max(a, sizes[i] * c // n), min(b, sizes[i] * (c + 1) // n)
            if low < high:
                cuts.append((k, low - a, high - a))
        if cuts:
            yield c, cuts


def _parts(row: Row, cuts: Sequence[tuple[int, int, int]]) -> list[Any]:
    return [row[k][a:b] for k, a, b in cuts]


def _whole(destinations: Sequence[Row], sources: Sequence[Row]) -> None:
    with Scratch() as scratch:
        totals = scratch.row(host(), sources[0])  # a destination may be a source
        for i, total in enumerate(totals):
            host().copy(total, sources[0][i])
            for row in sources[1:]:
                host().ops.accumulate(total, row[i])
            for destination in destinations:
                host().copy(destination[i], total)
