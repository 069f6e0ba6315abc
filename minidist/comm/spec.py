"""Spec: which algorithm sums tensors of which size, in one line of text.

    spec    =  range [ ":" limit ":" range ] …      the last range has no limit
    range   =  one [ "/" one ]                      in each machine, and between machines
    one     =  algorithm [ "#" shards ]
    limit   =  a number of elements; K, M and G after it are 2^10, 2^20 and 2^30

`pscpu:2k:xring#2` sums tensors of at most 2048 elements by pscpu and larger ones by xring in two
shards. `copy/xring` sums in each machine by copy and over the machines' sums by xring; on one
machine it is copy. The grammar is that of `all_reduce_spec` in tf_cnn_benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from minidist.errors import UsageError

ALGORITHMS = (
    "auto",
    "copy",
    "pscpu",
    "psgpu",
    "xring",
    "rechd",
    "hierarchical_copy",
    "nccl",
    "collective",
)
SHARDED = ("pscpu", "psgpu", "xring")
MOST_SHARDS = 1024  # each is a step of its own, however small the tensors

BETWEEN = ("xring", "rechd", "pscpu", "nccl", "collective")  # what there is between machines
SHARDED_BETWEEN = ("pscpu",)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Range:
    """Tensors of at most `limit` elements (None: of any size), and how they are summed.

    algorithm, shards: over all replicas, or over those of a machine where `between` says how the
    machines' sums are summed.
    """

    algorithm: str
    shards: int = 1
    limit: int | None = None
    between: str | None = None
    between_shards: int = 1

    def __str__(self) -> str:
        text = self.algorithm + _marked(self.shards)
        if self.between is not None:
            text += f"/{self.between}" + _marked(self.between_shards)
        return text + ("" if self.limit is None else f":{_short(self.limit)}")


@dataclass(frozen=True)
class Spec:
    """Ranges by rising limits, of which the last has none."""

    ranges: tuple[Range, ...]

    def __str__(self) -> str:
        return ":".join(map(str, self.ranges))

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL sums any of it."""
        return any("nccl" in (one.algorithm, one.between) for one in self.ranges)

    def members(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return for each range the numbers of the tensors in it, by their counts of elements."""
        members: list[list[int]] = [[] for _ in self.ranges]
        for i, size in enumerate(sizes):
            for own, one in zip(members, self.ranges, strict=True):
                if one.limit is None or size <= one.limit:
                    own.append(i)
                    break
        return members


def parse(text: str) -> Spec:
    """Return the spec that a text says; `str` of it is the shortest such text.

    Raises UsageError (a ValueError) for what is none.
    """
    if not isinstance(text, str):
        raise UsageError(f"all_reduce_spec={text!r} is no text such as 'xring#2'")
    parts = text.split(":")
    if len(parts) % 2 == 0:
        raise UsageError(
            f"all_reduce_spec={text!r} has {len(parts)} parts between its colons; they are "
            "algorithm:limit:algorithm …, so there must be an odd number"
        )
    ranges: list[Range] = []
    for part, limit in zip(parts[::2], [*parts[1::2], None], strict=True):
        inside, slash, across = part.partition("/")
        between = _algorithm(text, across, BETWEEN, SHARDED_BETWEEN) if slash else (None, 1)
        algorithm, shards = _algorithm(text, inside, ALGORITHMS, SHARDED)
        if slash and algorithm == "collective":
            raise UsageError(
                f"all_reduce_spec={text!r}: collective is MPI's sum over all ranks; before the "
                "slash stands what sums in a machine, such as copy"
            )
        most = None if limit is None else _limit(text, limit)
        ranges.append(Range(algorithm, shards, most, *between))
    limits = [one.limit for one in ranges if one.limit is not None]
    if any(b <= a for a, b in pairwise(limits)):
        raise UsageError(f"all_reduce_spec={text!r}: its limits {limits} must rise")
    return Spec(tuple(ranges))


def _algorithm(
    text: str, part: str, known: Sequence[str], sharded: Sequence[str]
) -> tuple[str, int]:
    algorithm, mark, shards = part.partition("#")
    if algorithm not in known:
        where = "" if known is ALGORITHMS else " between machines"
        raise UsageError(
            f"all_reduce_spec={text!r}: no algorithm is called {algorithm!r}{where}; there are "
            f"{', '.join(known)}"
        )
    if not mark:
        return algorithm, 1
    if not re.fullmatch("[0-9]{1,9}", shards) or not 1 <= int(shards) <= MOST_SHARDS:
        raise UsageError(
            f"all_reduce_spec={text!r}: after # comes a number of shards, from 1 to {MOST_SHARDS}, "
            f"not {shards!r}"
        )
    if int(shards) > 1 and algorithm not in sharded:
        where = "" if known is ALGORITHMS else " between machines"
        raise UsageError(
            f"all_reduce_spec={text!r}: {algorithm} has no shards{where}; "
            f"{', '.join(sharded)} may have them"
        )
    return algorithm, int(shards)


def _limit(text: str, limit: str) -> int:
    match = re.fullmatch("([0-9]{1,18})([KMG]?)", limit.upper())
    if match is None:
        raise UsageError(
            f"all_reduce_spec={text!r}: {limit!r} is no limit; write a number of elements, "
            "as 4096 or 4K"
        )
    return int(match[1]) * UNITS[match[2]]


def _marked(shards: int) -> str:
    return f"#{shards}" if shards > 1 else ""


def _short(limit: int) -> str:
    for letter in "GMK":
        if limit and limit % UNITS[letter] == 0:
            return f"{limit // UNITS[letter]}{letter}"
    return str(limit)
