"""Tiered: all-reduce over the replicas of several processes, in replica order.

Every rank brings the rows of its own replicas, and all get the sum over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidist.comm.base import Communicator
from minidist.comm.peers import Peers
from minidist.comm.row import Row
from minidist.traffic import Outline, Places, Traffic


class Tiered(Communicator):
    """inside: the communicator for the devices of this process. counts: replicas of each peer."""

    def __init__(self, inside: Communicator, peers: Peers, counts: Sequence[int]) -> None:
        self.devices = inside.devices
        self.order = inside.order
        self._inside = inside
        self._peers = peers
        self._counts = tuple(counts)

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        peers = self._peers
        kinds = [(array.shape, str(array.dtype)) for array in sources[0]]
        peers.meet(f"all_reduce {kinds}")
        every: list[Row] = []
        for peer, count in enumerate(self._counts):
            for k in range(count):
                row = sources[k] if peer == peers.me else Row(sources[0], sources[0].devices)
                for i, array in enumerate(row):
                    if peer == peers.me:
                        others = [other for other in range(peers.count) if other != peer]
                        flat = np.ascontiguousarray(array)
                        peers.wait([(o, peers.send(o, flat)) for o in others], "all_reduce")
                    else:
                        row[i] = np.empty(array.shape, array.dtype)
                        peers.wait([(peer, peers.receive(peer, row[i]))], "all_reduce")
                every.append(row)
        self._inside.all_reduce(every, destinations, weights, scale=scale, threads=threads)

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        return self._inside.predicted_bytes(tensors, destinations)
