"""Rounds: what the replicas of this process get at a time, still in the host's memory.

`split` makes rounds of global batches, `deal` of elements that are meant for one replica each. Both
end when this process's data does: the last round may be short on one replica and empty on the next.
That all workers end together is the business of `together.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minidist.errors import ShapeError, StructureError, UsageError
from minidist.input.share import Share
from minidist.regrouping import line_up
from minidist.structure import leaves, map_leaves
from minidist.tensor import Tensor
from minidist.values import PerReplica


@dataclass(frozen=True, slots=True)
class Round:
    """A structure of PerReplica arrays, and how many examples there are.

    They are those of the global batch where it was one, and else those of this process.
    """

    values: Any
    examples: int


# Makes rounds out of what one or several sources give; begun anew for each iteration.
Rounds = Callable[[Sequence[Iterable[Any]], Sequence[Iterator[Any]]], Iterator[Round]]


@dataclass(frozen=True, slots=True)
class Part:
    """This process's rows of a global batch, and how many examples that has in all."""

    values: Any
    examples: int


@runtime_checkable
class Divisible(Protocol):
    """An iterable of global batches that can give a part of each without making the rest."""

    def parts(self, rows: Callable[[int], slice]) -> Iterable[Part]:
        """Return those parts; `rows` says for a number of examples which of them are wanted."""
        ...


def own_part(batches: Iterable[Any], share: Share) -> Iterable[Any]:
    """Return global batches, or only this process's parts of them where it can be had so."""
    return batches.parts(share.rows) if isinstance(batches, Divisible) else batches


def split(
    share: Share, _: Sequence[Iterable[Any]], iterators: Sequence[Iterator[Any]]
) -> Iterator[Round]:
    """Split the global batches of the only source, or what is there of them.

    Raises ShapeError for a batch whose arrays have no first dimension, or different ones.
    """
    (batches,) = iterators
    for batch in batches:
        is_part = isinstance(batch, Part)
        element = map_leaves(_host_array, batch.values if is_part else batch)
        arrays = [array for array in leaves(element) if array is not None]
        lengths = {array.shape[:1] for array in arrays}
        if len(lengths) != 1 or () in lengths:
            raise ShapeError(
                "the arrays of a global batch must have the same first dimension, its examples; "
                f"they have shapes {[list(array.shape) for array in arrays]}"
            )
        examples = batch.examples if is_part else len(arrays[0])
        ends = share.ends(examples)
        before = ends[0] if is_part else 0
        cuts = [end - before for end in ends]
        if is_part and len(arrays[0]) != cuts[-1]:
            raise ShapeError(
                f"{cuts[-1]} of the {examples} examples of a global batch belong here, but the "
                f"data set has given {len(arrays[0])}"
            )
        yield Round(map_leaves(partial(_split, cuts), element), examples)


def _split(ends: Sequence[int], array: Any) -> PerReplica | None:
    return None if array is None else PerReplica(None, [array[a:b] for a, b in pairwise(ends)])


def deal(
    share: Share,
    ends: str,
    sources: Sequence[Iterable[Any]],
    iterators: Sequence[Iterator[Any]],
) -> Iterator[Round]:
    """Give each source's elements, one after another, to the replicas that belong to it.

    With one source these are all replicas; with several each has equally many, in order. In the
    last round some may be left without: with ends="join" they get empty elements, with "pad" their
    source's from its beginning; with "drop" there is no such round.
    Raises StructureError where elements of one round differ in structure, UsageError (a ValueError)
    for a source that cannot be read again and must be.
    """
    per_source = share.count // len(iterators)
    owners = [replica // per_source for replica in range(share.count)]
    feeds = list(iterators)
    ended: set[int] = set()  # sources
    latest: dict[int, Any] = {}  # element of each source
    while True:
        row = []
        for owner in owners:
            item = _NOTHING if owner in ended else next(feeds[owner], _NOTHING)
            if item is _NOTHING:
                ended.add(owner)
            row.append(item)
        missing = [replica for replica, item in enumerate(row) if item is _NOTHING]
        if len(missing) == len(row) or (missing and ends == "drop"):
            return
        if ends == "pad":
            for replica in missing:
                row[replica] = _again(sources, feeds, owners[replica])
        known = [map_leaves(_host_array, item) for item in row if item is not _NOTHING]
        rest = iter(known)
        elements = []
        for owner, item in zip(owners, row, strict=True):
            if item is not _NOTHING:
                latest[owner] = next(rest)
                elements.append(latest[owner])
            else:
                elements.append(map_leaves(empty_like, latest.get(owner, known[0])))
        yield Round(_line_up(elements), sum(map(_examples, known)))


def _again(sources: Sequence[Iterable[Any]], feeds: list[Iterator[Any]], owner: int) -> Any:
    """Return the next element of a source that has ended, which begins anew for it."""
    item = next(feeds[owner], _NOTHING)
    if item is _NOTHING:
        feeds[owner] = iter(sources[owner])
        item = next(feeds[owner], _NOTHING)
    if item is _NOTHING:
        raise UsageError(
            "ends='pad' repeats what a replica without data had before, but there is nothing to "
            "repeat: its data is an iterator, which can be read only once, or has no elements"
        )
    return item


_NOTHING = object()


def _line_up(elements: Sequence[Any]) -> Any:
    """Return the replicas' elements as one structure of PerReplica arrays."""
    try:
        return map_leaves(_all_or_none, line_up(elements))
    except StructureError as error:
        raise StructureError(f"elements of one round differ in structure: {error}") from None


def _all_or_none(leaf: PerReplica) -> PerReplica | None:
    missing = [array is None for array in leaf.values]
    if any(missing) and not all(missing):
        raise StructureError("some have None where others have an array")
    return None if any(missing) else leaf


def _host_array(leaf: Any) -> Any:
    """Return a leaf as an array in the host's memory; None stays None."""
    if leaf is None:
        return None
    array = leaf.numpy() if isinstance(leaf, Tensor) else np.asarray(leaf)
    if array.dtype.kind in "OUSM":
        raise ShapeError(
            f"elements of type {array.dtype} cannot be placed on a device; let the data set turn "
            "them into numbers"
        )
    return array


def _examples(element: Any) -> int:
    array = next((array for array in leaves(element) if array is not None), None)
    return 0 if array is None else len(array) if array.ndim else 1


def empty_like(array: Any) -> Any:
    """Return what a replica without data gets: no examples, or 0 where there is no dimension."""
    if array is None:
        return None
    return np.zeros((0, *array.shape[1:]) if array.ndim else (), array.dtype)
