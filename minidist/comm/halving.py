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
from itertools import product

from minidist.comm.algorithm import Algorithm
from minidist.comm.cutting import cut, joined, lengths, runs
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.comm.tree import twigs
from minidist.device import Device
from minidist.traffic import Outline, Places, Traffic


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
            rows = [self._folded([given[i] for i in group], scratch, threads) for group in groups]
            plan = runs(lengths(given[0]), len(groups))
            blocks = [cut(row, plan) for row in rows]
            results = {home: cut(wanted[home], plan) for home in homes}
            self._halve(blocks, [results[home] for home in homes], scratch, scale, threads)
            self._double(results, homes, threads)
            for group, home in zip(groups, homes, strict=True):
                rest = [i for i in range(around) if i not in results and i % n in group]
                if rest:
                    self._copy([wanted[i] for i in rest], wanted[home], threads)

    def _folded(self, pair: Sequence[Row], scratch: Scratch, threads: int) -> Row:
        """Return what a participant brings: its own row, or the sum of the two it stands for."""
        if len(pair) == 1:
            return pair[0]
        row = scratch.row(pair[0].devices[0], pair[0])
        self._sum_by(row.devices, [row], pair, threads=threads)
        return row

    def _halve(
        self,
        blocks: Sequence[list[Row]],
        results: Sequence[Sequence[Row]],
        scratch: Scratch,
        scale: float,
        threads: int,
    ) -> None:
        """Leave each block's sum in the result of the one participant that keeps it to the end."""
        depth = _depth(len(blocks))
        homes = [own[0].devices[0] for own in blocks]
        for step in range(depth):
            last = step == depth - 1
            into: list[Row] = []
            first: list[Row] = []
            second: list[Row] = []
            by: list[Device] = []
            for p, own in enumerate(blocks):
                mate = p ^ 1 << step
                for b in _kept(p, step + 1, depth):
                    first.append(blocks[min(p, mate)][b])
                    second.append(blocks[max(p, mate)][b])
                    by += [homes[p]] * len(own[b])
                    if last:
                        own[b] = results[p][b]
                    elif step == 0:  # later steps add in place
                        own[b] = scratch.row(homes[p], own[b])
                    into.append(own[b])
            self._sum_by(
                by,
                [joined(into)],
                [joined(first), joined(second)],
                scale=scale if last else 1.0,
                threads=threads,
            )

    def _double(self, results: dict[int, list[Row]], homes: Sequence[int], threads: int) -> None:
        """Let every home get all blocks."""
        depth = _depth(len(homes))
        have = {(homes[p], b) for p in range(len(homes)) for b in _kept(p, depth, depth)}
        for step in reversed(range(depth)):
            into: list[Row] = []
            source: list[Row] = []
            for p, home in enumerate(homes):
                mate = p ^ 1 << step
                for b in _kept(mate, step + 1, depth):
                    if (home, b) not in have:
                        have.add((home, b))
                        into.append(results[home][b])
                        source.append(results[homes[mate]][b])
            if into:
                self._copy([joined(into)], joined(source), threads)

    def _sum_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """Block b goes to its owner along a tree, and along the same one back.

        The owner is the participant whose number has the bits of b in reverse. In step s every
        participant whose lowest s + 1 bits are the owner's gets the block from the one that
        differs in bit s.
        """
        traffic = Traffic()
        tensors, destinations = self._packed_bytes(traffic, tensors, destinations)
        n, around = len(self.devices), len(destinations)
        groups = twigs(range(n))
        depth = _depth(len(groups))
        homes = [group[0] % around for group in groups]
        for group in groups:
            for other in group[1:]:
                traffic.each(self._homes(other, tensors), self._homes(group[0], tensors), tensors)
            for d in range(around):
                if d not in homes and d % n in group:
                    traffic.each(destinations[group[0] % around], destinations[d], tensors)
        members = range(len(groups))
        for b in members:
            block = _block(tensors, b, len(groups))
            at = [self._homes(group[0], block) for group in groups]
            owner = sum((b >> s & 1) << depth - 1 - s for s in range(depth))
            for s, p in product(range(depth), members):
                if (p ^ owner) % (2 << s) == 0:
                    traffic.each(at[p ^ 1 << s], at[p], block)
            traffic.each(at[owner], destinations[homes[owner]], block)
            have = {homes[owner]}
            for s, p in product(reversed(range(depth)), members):
                mate = p ^ 1 << s
                if (mate ^ owner) % (2 << s) == 0 and homes[p] not in have:
                    have.add(homes[p])
                    traffic.each(destinations[homes[mate]], destinations[homes[p]], block)
        return traffic


def _depth(participants: int) -> int:
    return participants.bit_length() - 1


def _block(tensors: Sequence[Outline], b: int, count: int) -> list[Outline]:
    """Return what block b of `count` has of each tensor, all of them being one run of elements."""
    total, start, block = sum(tensor.size for tensor in tensors), 0, []
    first, end = total * b // count, total * (b + 1) // count
    for size, dtype in tensors:
        block.append(Outline(max(0, min(end, start + size) - max(first, start)), dtype))
        start += size
    return block


def _kept(p: int, steps: int, depth: int) -> list[int]:
    """Return the blocks that participant p is still busy with after some steps of halving.

    In step s it keeps the upper half of them if bit s of p is set, else the lower half.
    """
    first, count = 0, 1 << depth
    for step in range(steps):
        count //= 2
        first += count * (p >> step & 1)
    return list(range(first, first + count))
