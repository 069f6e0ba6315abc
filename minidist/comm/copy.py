"""copy: one device sums a tensor and gives it to all, in one pass over memory.

      replica 0   g0 ──┐
      replica 1   g1 ──┼─►  (g0 + g1) + g2  ──►  every destination
      replica 2   g2 ──┘

Tensor i is summed on device i mod n of the reducers: the compute devices, or the host alone. Each
element is added up once, in replica order, and stored into each destination from the register it
was added up in: n reads and a write for each destination. What is summed by devices of one
arithmetic and memory, as all on the CPU are, goes in one call. Chunks of elements are spread over
threads; which thread does a chunk changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.algorithm import Algorithm
from minidist.comm.base import columns
from minidist.comm.packing import Packer
from minidist.comm.scratch import Row
from minidist.device import Device


class Copy(Algorithm):
    """All-reduce in one pass. reducers: the devices that sum, all of them if not given."""

    order = "serial"

    def __init__(
        self,
        devices: Sequence[Device],
        packer: Packer | None = None,
        reducers: Sequence[Device] | None = None,
    ) -> None:
        super().__init__(devices, packer)
        self._turns = [device.ops for device in reducers or devices]
        self._at_once = packer is None and len(set(self._turns)) == 1

    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        turns = self._turns
        if self._at_once:
            turns[0].sum(destinations, sources, weights=weights, scale=scale, threads=threads)
            return
        with self._packed(sources, destinations) as (given, wanted):
            for ops in dict.fromkeys(turns):
                members = [i for i in range(len(given[0])) if turns[i % len(turns)] is ops]
                some = len(members) < len(given[0])
                ops.sum(
                    columns(wanted, members) if some else wanted,
                    columns(given, members) if some else given,
                    weights=weights,
                    scale=scale,
                    threads=threads,
                )

    def _narrow(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        self._floats(sources, destinations, weights, scale, threads)  # the verb itself widens them
