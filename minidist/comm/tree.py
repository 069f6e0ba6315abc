"""Tree: the order in which rechd and hierarchical_copy sum.

    the tree of replicas 0 … n-1: the sum of the first half, plus that of the second half;
    where n is odd the first half is the larger; one replica is its own sum

        n = 4   (g0 + g1) + (g2 + g3)            n = 3   (g0 + g1) + g2
        n = 5   ((g0 + g1) + g2) + (g3 + g4)     n = 7   ((g0+g1) + (g2+g3)) + ((g4+g5) + g6)

The order is the same for every element, so no packing or cutting changes a bit. Of n the replicas
that bring something are meant, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Each = TypeVar("Each")


def halves(replicas: Sequence[Each]) -> tuple[Sequence[Each], Sequence[Each]]:
    """Return what the replicas of the first half have, and those of the second."""
    middle = (len(replicas) + 1) // 2
    return replicas[:middle], replicas[middle:]


def twigs(replicas: Sequence[int]) -> list[Sequence[int]]:
    """Return the tree cut at the height where there are most halves, but a power of two of them.

    Each is one replica or two, and they come from left to right.
    """
    level = [replicas]
    while 2 * len(level) <= len(replicas):
        level = [half for group in level for half in halves(group)]
    return level
