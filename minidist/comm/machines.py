"""Machines: which ranks share one, and with whom each of them speaks on the others.

    machine 0   rank 0  rank 1        a rank's *lane* are those of its place on every machine:
    machine 1   rank 2  rank 3        0 2 4 and 1 3 5. On each machine the ranks divide what is
    machine 2   rank 4  rank 5        summed among them, and share k goes through lane k

That takes equally many ranks on every machine, numbered machine by machine. Where they are not,
every rank counts as a machine of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Machines:
    """The machines as seen by one rank. ranks: the peers on each of them."""

    ranks: Sequence[Sequence[int]]
    me: int

    @classmethod
    def of(cls, hosts: Sequence[str], me: int, *, apart: bool = False) -> Machines:
        """hosts: the name of each peer's machine. apart: let every rank be a machine of its own."""
        by_host: dict[str, list[int]] = {}
        for peer, host in enumerate(hosts):
            by_host.setdefault(host, []).append(peer)
        ranks = list(by_host.values())
        size = len(ranks[0])
        runs = [list(range(k * size, (k + 1) * size)) for k in range(len(ranks))]
        if apart or ranks != runs:
            ranks = [[peer] for peer in range(len(hosts))]
        return cls(ranks, me)

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def here(self) -> Sequence[int]:
        """The ranks on this one's machine."""
        return next(ranks for ranks in self.ranks if self.me in ranks)

    @property
    def lane(self) -> Sequence[int]:
        """The ranks of this one's place, by machine."""
        place = self.here.index(self.me)
        return [ranks[place] for ranks in self.ranks]
