"""Collective: MPI's own all-reduce between the machines.

    machine 0   S0 ──┐
    machine 1   S1 ──┼── MPI_Iallreduce ──►  total on every machine
    machine 2   S2 ──┘

In what order it sums is MPI's business: it may depend on the library, the size and the machines, so
the bits are those of no class. All machines get the same. What is summed in float32, float64 or an
integer type goes from the replica's own array into the first destination, if these are what MPI
can read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist import observe
from minidist.comm.between import Between, Flight, Share
from minidist.comm.lane import Lane
from minidist.comm.orders import accumulator, scaled, store
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.device import Array
from minidist.traffic import Outline, Traffic


class Collective(Between):
    """MPI's sum over the ranks of a lane. inside: the order of each machine's own sum."""

    room = 1 << 28

    def __init__(self, lane: Lane, inside: str) -> None:
        self._lane = lane
        self._inside = inside
        self.order = f"{inside}/collective"
        self.lag = 2
        # Made now, and not when it is first needed: making one holds up the engine, and two threads
        # of a rank may need theirs in another order than those of the others.
        self._communicator = lane.peers.communicator(lane.machines)

    def begin(self, share: Share) -> Flight:
        return _Summing(self._lane, self._communicator, share, self._inside)

    def settle(self) -> None:
        """Every flight has waited for its own."""

    def predicted_bytes(self, block: Outline, number: int, first: int) -> Traffic:
        """What MPI sends to whom is not known; it is given the block."""
        me, wide = self._lane.name(self._lane.me), accumulator(block.dtype).itemsize
        return Traffic({f"{me}->MPI": block.size * wide})


class _Summing(Flight):
    def __init__(self, lane: Lane, communicator: Any, share: Share, inside: str) -> None:
        self._lane, self._share = lane, share
        self._scratch = Scratch()
        given, self._total = self._buffers(inside)
        if observe.counting:
            observe.moved(lane.name(lane.me), "MPI", self._total.nbytes, "network")
        self._pending = lane.peers.all_reduce(communicator, given, self._total)

    def _buffers(self, inside: str) -> tuple[Array | None, Array]:
        """Return what MPI reads (None: what it writes) and what it writes."""
        share = self._share
        plain = len(share.like) == 1 and share.like[0].dtype.char in "fd"
        if share.into is not None and plain and len(share.rows) == 1 and share.weights is None:
            given, total = share.rows[0][0], share.into[0][0]
            return (None if given.ctypes.data == total.ctypes.data else given), total
        total = share.own_sum(self._scratch, inside)
        if not share.rows:
            total[...] = 0
        return None, total

    def finish(self, into: Sequence[Row]) -> None:
        lane, share = self._lane, self._share
        lane.wait([(peer, self._pending) for peer in lane.machines if peer != lane.peers.me])
        total = share.row(self._total)
        scaled(total, share.scale, share.threads)
        rest = [row for row in into if row[0].ctypes.data != self._total.ctypes.data]
        if rest:
            store(rest, total, share.threads)
        self._scratch.close()
