"""Mail: the packets of a meeting, between ranks that share memory.

    rank 0's plot   │ fence: 5 │ packet 4 │ packet 5 │   two boxes, used by turns: who puts packet 6
    rank 1's plot   │ fence: 4 │ packet 4 │ packet 3 │   into the first has read all others' packet
                                                         5, so all have read packet 4

A fence counts the packets that its rank has put.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidist.comm.mpi import SPIN
from minidist.comm.window import LINE
from minidist.device import Array
from minidist.kernels.rendezvous import SharedFence

BOX = 16 << 10  # bytes of a packet; what is longer is the business of who puts it
PLOT = LINE + 2 * BOX


class Mail:
    """plots: of each rank, in order. me: the number of this one."""

    def __init__(self, plots: Sequence[Array], me: int) -> None:
        self._plots = plots
        self._me = me
        self.fences = [SharedFence(plot[:LINE], SPIN) for plot in plots]
        self.count = 0  # packets that each rank has put, this one included

    def put(self, packet: bytes) -> None:
        """Put a packet of at most BOX bytes, for all to read."""
        self.count += 1
        self._box(self._me)[: len(packet)] = np.frombuffer(packet, np.uint8)
        self.fences[self._me].advance()

    def read(self, rank: int) -> memoryview:
        """Return what a rank has put, once its fence has reached `count`; valid until `put`."""
        box: memoryview = self._box(rank).data
        return box

    def _box(self, rank: int) -> Array:
        start = LINE + self.count % 2 * BOX
        return self._plots[rank][start : start + BOX]
