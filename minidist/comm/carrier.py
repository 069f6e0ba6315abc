"""Carrier: how members of a group hand each other arrays, round after round.

In a round every member writes something for each other one (or one thing for all), hands it over,
and takes what each has written for it. All members take part in every round, in the same order,
and each knows how much the others write.

                 writes          hands over      takes
    member 0    0→1  0→2   ─┐               ┌─  1→0  2→0
    member 1    1→0  1→2   ─┼──── round ────┼─  0→1  2→1
    member 2    2→0  2→1   ─┘               └─  0→2  1→2

letters.py carries by messages, boards.py in memory that the members share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from minidist.device import Array
from minidist.traffic import Traffic

# Bytes that a member can write for another one, or for all, in a round: a MiB, so that latency does
# not show, and what rounding adds. The same for all carriers: groups of several work together.
ROOM = (1 << 20) + (1 << 14)


class Round(ABC):
    """One round, as seen by one member. Its arrays are flat and of one dtype."""

    @abstractmethod
    def desk(self, to: int) -> Array:
        """Return where to write what is for a member."""

    @abstractmethod
    def hand_over(self) -> None:
        """Let the others have what was written. Nothing is written after it."""

    @abstractmethod
    def take(self, source: int) -> Array:
        """Wait for what a member has written for this one; to be read before the round ends."""


class Carrier(ABC):
    """A group of peers, and this one's place among them.

    members: their numbers among the peers. me: the place of this one in `members`.
    """

    members: tuple[int, ...]
    me: int

    @abstractmethod
    def round(
        self, out: int | Sequence[int], into: Sequence[int], dtype: Any, what: str
    ) -> AbstractContextManager[Round]:
        """Return a round, for the length of a with statement.

        out: how many elements go to each member, or how many to all of them, the same. into: how
        many come from each. what: what it is for, for errors.
        """

    @abstractmethod
    def predicted_bytes(self, out: int | Sequence[int], into: Sequence[int], dtype: Any) -> Traffic:
        """Return what this member is counted for in such a round."""
