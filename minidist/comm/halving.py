"""rechd: recursive halving and doubling, in 2·log2(n) steps.

In each step of halving a participant and its mate give each other one half of what they are still
busy with, and each adds the other's to the half it keeps; then the finished blocks are exchanged
the same way back, twice as much each time (Thakur, Rabenseifner and Gropp 2005). For n = 4, where
AB… are blocks and 01… the replicas that are summed in them:

              given      halving                    doubling
    replica 0  ABCD │ AB of 01 │ A of 01+23 │  A  C    │  A B C D      mates 0-1, 2-3
    replica 1  ABCD │ CD of 01 │ C of 01+23 │  A  C    │  A B C D      then 0-2, 1-3
    replica 2  ABCD │ AB of 23 │ B of 01+23 │    B  D  │  A B C D      and back
    replica 3  ABCD │ CD of 23 │ D of 01+23 │    B  D  │  A B C D

Where n is no power of two, some participants stand for two replicas: the second gives the first all
it has before, and gets the result after. The order of the sum is the tree's (tree.py).
A step is one call for all participants, shared by threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.algorithm import Algorithm
from minidist.comm.cutting import cut, lengths, runs
from minidist.comm.scratch import Row, Scratch
from minidist.comm.tree import twigs
from minidist.device import Array


class HalvingDoubling(Algorithm):
    """All-reduce by recursive halving and doubling."""

    order = "tree"

    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        n, around = len(sources), len(destinations)
        groups = twigs(range(n))  # the replicas that each participant stands for
        homes = [group[0] % around for group in groups]  # each one's destination
        with (
            self._weighted(sources, weights, threads) as weighted,
            self._packed(weighted, destinations) as (given, wanted),
            Scratch() as scratch,
        ):
            rows = [
                self._folded([given[i] for i in group], group, scratch, threads) for group in groups
            ]
            plan = runs(lengths(given[0]), len(groups))
            blocks = [cut(row, plan) for row in rows]
            results = {home: cut(wanted[home], plan) for home in homes}
            self._halve(blocks, [results[home] for home in homes], groups, scratch, scale, threads)
            self._double(results, homes, threads)
            for group, home in zip(groups, homes, strict=True):
                rest = [i for i in range(around) if i not in results and i % n in group]
                if rest:
                    self._copy([wanted[i] for i in rest], wanted[home], threads)

    def _folded(
        self, pair: Sequence[Row], replicas: Sequence[int], scratch: Scratch, threads: int
    ) -> Row:
        """Return what a participant brings: its own row, or the sum of the two it stands for."""
        if len(pair) == 1:
            return pair[0]
        row = scratch.row(self._device(replicas[0]), pair[0])
        self._ops.sum([row], pair, threads=threads)
        return row

    def _halve(
        self,
        blocks: Sequence[list[list[Array]]],
        results: Sequence[Sequence[Row]],
        groups: Sequence[Sequence[int]],
        scratch: Scratch,
        scale: float,
        threads: int,
    ) -> None:
        """Leave each block's sum in the result of the one participant that keeps it to the end."""
        depth = _depth(len(groups))
        for step in range(depth):
            last = step == depth - 1
            into: list[Array] = []
            first: list[Array] = []
            second: list[Array] = []
            for p, own in enumerate(blocks):
                mate = p ^ 1 << step
                for b in _kept(p, step + 1, depth):
                    first += blocks[min(p, mate)][b]
                    second += blocks[max(p, mate)][b]
                    if last:
                        own[b] = list(results[p][b])
                    elif step == 0:  # later steps add in place
                        own[b] = scratch.row(self._device(groups[p][0]), own[b])
                    into += own[b]
            self._ops.sum([into], [first, second], scale=scale if last else 1.0, threads=threads)

    def _double(
        self, results: dict[int, list[list[Array]]], homes: Sequence[int], threads: int
    ) -> None:
        """Let every home get all blocks."""
        depth = _depth(len(homes))
        have = {(homes[p], b) for p in range(len(homes)) for b in _kept(p, depth, depth)}
        for step in reversed(range(depth)):
            into: list[Array] = []
            source: list[Array] = []
            for p, home in enumerate(homes):
                mate = p ^ 1 << step
                for b in _kept(mate, step + 1, depth):
                    if (home, b) not in have:
                        have.add((home, b))
                        into += results[home][b]
                        source += results[homes[mate]][b]
            if into:
                self._copy([into], source, threads)


def _depth(participants: int) -> int:
    return participants.bit_length() - 1


def _kept(p: int, steps: int, depth: int) -> list[int]:
    """Return the blocks that participant p is still busy with after some steps of halving.

    In step s it keeps the upper half of them if bit s of p is set, else the lower half.
    """
    first, count = 0, 1 << depth
    for step in range(steps):
        count //= 2
        first += count * (p >> step & 1)
    return list(range(first, first + count))
