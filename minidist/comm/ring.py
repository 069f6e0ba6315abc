"""xring: chunks go round a ring of replicas, and nobody handles more than its share.

Each tensor is cut in n chunks. In n - 1 steps of reduce-scatter every replica passes a partial sum
on to the next one, which adds its own chunk; in n - 1 steps of all-gather the finished chunks go
round once more (Patarasuk and Yuan 2009). What each replica holds after each step, for n = 3:

                 given        reduce-scatter       all-gather
    replica 0  a0 b0 c0 │ c2+0  │ b1+2+0 │  a  b    │  a  b  c
    replica 1  a1 b1 c1 │ a0+1  │ c2+0+1 │     b  c │  a  b  c
    replica 2  a2 b2 c2 │ b1+2  │ a0+1+2 │  a     c │  a  b  c

So chunk c is summed as ((g_c + g_{c+1}) + …) + g_{c+n-1}, indices modulo n: the order depends on
an element's place in its tensor, and on nothing else. With shards every chunk is cut again, and the
rings of the shards turn one after the other: the order stays, less is on its way at a time.
Of n the replicas that bring something are meant, in their order. A step is one call for all
replicas, shared by threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from minidist.comm.algorithm import Algorithm
from minidist.comm.cutting import cut, joined, lengths, shares
from minidist.comm.packing import Packer
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch, laid, room
from minidist.device import Device
from minidist.traffic import Outline, Places, Traffic


class Ring(Algorithm):
    """All-reduce by a ring."""

    order = "ring"

    def __init__(
        self, devices: Sequence[Device], packer: Packer | None = None, shards: int = 1
    ) -> None:
        super().__init__(devices, packer)
        self._shards = shards

    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        n = len(sources)
        with ExitStack() as stack:
            weighted = stack.enter_context(self._weighted(sources, weights, threads))
            plan = shares(lengths(sources[0]), n)
            given = zip(*[cut(row, plan) for row in weighted], strict=True)
            wanted = zip(*[cut(row, plan) for row in destinations], strict=True)
            # A chunk is packed by itself, since packing must not move an element to another one.
            chunks = [
                stack.enter_context(self._packed(*rows)) for rows in zip(given, wanted, strict=True)
            ]
            for turn in zip(*[self._sharded(*rows) for rows in chunks], strict=True):
                chunk_given = [rows for rows, _ in turn]
                chunk_wanted = [rows for _, rows in turn]
                self._reduce_scatter(chunk_given, chunk_wanted, scale, threads)
                self._all_gather(chunk_wanted, n, threads)

    def _sharded(
        self, given: Sequence[Row], wanted: Sequence[Row]
    ) -> Sequence[tuple[Sequence[Row], Sequence[Row]]]:
        """Return for each shard its part of a chunk's rows."""
        if self._shards == 1:
            return [(given, wanted)]
        plan = shares(lengths(given[0]), self._shards)
        parts = [
            list(zip(*[cut(row, plan) for row in rows], strict=True)) for rows in (given, wanted)
        ]
        return list(zip(*parts, strict=True))

    def _reduce_scatter(
        self,
        given: Sequence[Sequence[Row]],
        wanted: Sequence[Sequence[Row]],
        scale: float,
        threads: int,
    ) -> None:
        """Leave each chunk's sum in the destination of the last replica that it comes to."""
        n = len(given)
        with Scratch() as scratch:
            dtype = given[0][0][0].dtype
            length = max(room(rows[0], dtype) for rows in given)
            # A replica writes into one of its two rooms what the next one reads from the other.
            homes = [row.devices[0] for row in given[0]]
            rooms = [
                [scratch.flat(home, length, dtype) for _ in range(min(2, n - 2))] for home in homes
            ]
            partial = [rows[c] for c, rows in enumerate(given)]
            for step in range(1, n):
                at = [(c + step) % n for c in range(n)]  # the replica that each chunk comes to
                into = [
                    wanted[c][r % len(wanted[c])]
                    if step == n - 1
                    else laid(rooms[r][step % len(rooms[r])], partial[c], homes[r])
                    for c, r in enumerate(at)
                ]
                own = joined([given[c][r] for c, r in enumerate(at)])
                self._sum_by(
                    own.devices,
                    [joined(into)],
                    [joined(partial), own],
                    scale=scale if step == n - 1 else 1.0,
                    threads=threads,
                )
                partial = into

    def _all_gather(self, wanted: Sequence[Sequence[Row]], n: int, threads: int) -> None:
        """Pass each chunk's sum on from destination to destination."""
        around = len(wanted[0])
        for step in range(1, around):
            at = [((c + n - 1) % n + step) % around for c in range(n)]
            here = [wanted[c][d] for c, d in enumerate(at)]
            before = [wanted[c][d - 1] for c, d in enumerate(at)]
            self._copy([joined(here)], joined(before), threads)

    def _sum_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """Chunk c goes from replica c all the way round to the last one, which hands it on.

        From the destination that gets it there it goes round all of them.
        """
        traffic = Traffic()
        n, around = len(self.devices), len(destinations)
        for c in range(n):
            chunk = [Outline(size * (c + 1) // n - size * c // n, dtype) for size, dtype in tensors]
            row, wanted = self._packed_bytes(traffic, chunk, destinations)
            last = (c - 1) % n
            for replica in range(n):
                if replica != c:
                    before = self._homes(replica - 1, row)
                    traffic.each(before, self._homes(replica, row), row)
            traffic.each(self._homes(last, row), wanted[last % around], row)
            for d in range(around):
                if d != last % around:
                    traffic.each(wanted[d - 1], wanted[d], row)
        return traffic
