"""pscpu, psgpu: auxiliary devices sum, and everybody fetches the sum from there.

      replica 0   a0 b0 ──┐      server 0   (a0 + a1) + a2  ──┐
      replica 1   a1 b1 ──┼─►                                 ├─►  every destination
      replica 2   a2 b2 ──┘      server 1   (b0 + b1) + b2  ──┘

pscpu has one server, the host; psgpu has the compute devices. Tensors are dealt out to the servers
by turns. With shards each tensor is cut in as many equal parts, and the next shard begins with the
next server; a shard is handed out before the next one is summed, so a small one is still in the
cache then. Each element is added up once, in replica order.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.algorithm import Algorithm
from minidist.comm.cutting import cut, lengths, shares
from minidist.comm.packing import Packer
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.device import Device
from minidist.traffic import Outline, Places, Traffic


class Servers(Algorithm):
    """All-reduce by servers that hold the sums. servers: their devices."""

    order = "serial"

    def __init__(
        self,
        devices: Sequence[Device],
        packer: Packer | None,
        servers: Sequence[Device],
        shards: int,
    ) -> None:
        super().__init__(devices, packer)
        self._servers = tuple(servers)
        self._shards = shards

    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        with self._packed(sources, destinations) as (given, wanted):
            plan = shares(lengths(given[0]), self._shards)
            parts = [cut(row, plan) for row in given]
            places = [cut(row, plan) for row in wanted]
            for shard in range(self._shards):
                own = [part[shard] for part in parts]
                with Scratch() as scratch:
                    totals = scratch.spread(self._servers, own[0], shard)
                    self._sum_by(totals.devices, [totals], own, weights, scale, threads=threads)
                    self._copy([place[shard] for place in places], totals, threads)

    def _sum_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """Of shard k of tensor i, all n go to server i + k, and one to every destination."""
        traffic = Traffic()
        tensors, destinations = self._packed_bytes(traffic, tensors, destinations)
        for i, (size, dtype) in enumerate(tensors):
            for k in range(self._shards):
                share = size * (k + 1) // self._shards - size * k // self._shards
                server = self._servers[(i + k) % len(self._servers)]
                for device in self.devices:
                    traffic.go(device, server, share * dtype.itemsize)
                for places in destinations:
                    traffic.go(server, places[i], share * dtype.itemsize)
        return traffic
