"""Rounds: what the replicas get at a time, still in the host's memory.

`split` makes rounds of global batches, `deal` of elements that are meant for one replica each. Both
end when their data does: the last round may be short on one replica and empty on the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from minidist.errors import ShapeError, StructureError
from minidist.regrouping import line_up
from minidist.structure import leaves, map_leaves
from minidist.tensor import Tensor
from minidist.values import PerReplica


@dataclass(frozen=True, slots=True)
class Round:
    """A structure of PerReplica arrays, and how many examples there are in all."""

    values: Any
    examples: int


# Makes rounds for so many replicas out of the iterators of one or several sources.
Rounds = Callable[[Sequence[Iterator[Any]], int], Iterator[Round]]


def split_sizes(examples: int, replicas: int) -> list[int]:
    """Return how many of a global batch's examples each replica gets, larger parts first."""
    share, more = divmod(examples, replicas)
    return [share + (replica < more) for replica in range(replicas)]


def split(sources: Sequence[Iterator[Any]], replicas: int) -> Iterator[Round]:
    """Split the global batches of the only source.

    Raises ShapeError for a batch whose arrays have no first dimension, or different ones.
    """
    (batches,) = sources
    for batch in batches:
        element = map_leaves(_host_array, batch)
        arrays = [array for array in leaves(element) if array is not None]
        lengths = {array.shape[:1] for array in arrays}
        if len(lengths) != 1 or () in lengths:
            raise ShapeError(
                "the arrays of a global batch must have the same first dimension, its examples; "
                f"they have shapes {[list(array.shape) for array in arrays]}"
            )
        examples = len(arrays[0])
        ends = list(accumulate(split_sizes(examples, replicas), initial=0))
        yield Round(map_leaves(partial(_split, ends), element), examples)


def _split(ends: Sequence[int], array: Any) -> PerReplica | None:
    return None if array is None else PerReplica(None, [array[a:b] for a, b in pairwise(ends)])


def deal(sources: Sequence[Iterator[Any]], replicas: int) -> Iterator[Round]:
    """Give each source's elements, one after another, to the replicas that belong to it.

    With one source these are all replicas; with several each has equally many, in order. Where one
    has no more its replicas get empty elements, until none has any.
    Raises StructureError where elements of one round differ in structure.
    """
    share = replicas // len(sources)
    owners = [replica // share for replica in range(replicas)]
    latest: dict[int, Any] = {}  # element of each source
    while True:
        row = [next(sources[owner], _NOTHING) for owner in owners]
        known = [map_leaves(_host_array, item) for item in row if item is not _NOTHING]
        if not known:
            return
        rest = iter(known)
        elements = []
        for owner, item in zip(owners, row, strict=True):
            if item is not _NOTHING:
                latest[owner] = next(rest)
                elements.append(latest[owner])
            else:
                elements.append(map_leaves(_empty_like, latest.get(owner, known[0])))
        yield Round(_line_up(elements), sum(map(_examples, known)))


def full(rounds: Iterator[Round]) -> Iterator[Round]:
    """Leave out the rounds with fewer examples than the first."""
    least = 0
    for item in rounds:
        least = least or item.examples
        if item.examples >= least:
            yield item


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


def _empty_like(array: Any) -> Any:
    """Return what a replica without data gets: no examples, or 0 where there is no dimension."""
    if array is None:
        return None
    return np.zeros((0, *array.shape[1:]) if array.ndim else (), array.dtype)
