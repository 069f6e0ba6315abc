"""copy: one device sums a tensor and gives it to all, in one pass over memory.

      replica 0   g0 ──┐
      replica 1   g1 ──┼─►  (g0 + g1) + g2  ──►  every destination
      replica 2   g2 ──┘

Tensor i is summed on device i mod n of the reducers: the compute devices, or the host alone. Each
element is added up once, in replica order, and stored into each destination from the register it
was added up in: n reads and a write for each destination. What is summed by devices of one
arithmetic and memory, as all on the CPU and all on one GPU are, goes in one call. Chunks of
elements are spread over threads; which thread does a chunk changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist import observe
from minidist.comm.algorithm import Algorithm
from minidist.comm.packing import Packer
from minidist.comm.row import Row, columns, tell
from minidist.device import Device
from minidist.device.ops import Ops
from minidist.traffic import Outline, Places, Traffic


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
        self._reducers = tuple(reducers or devices)
        # Several devices on one GPU share its memory: one of them sums for all, in one launch.
        one: dict[tuple[str, int], Ops] = {}
        self._turns = [one.setdefault((d.kind, d.index), d.ops) for d in self._reducers]
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
            if observe.counting:
                tell(self._by(len(sources[0])), destinations, sources)
            turns[0].sum(destinations, sources, weights=weights, scale=scale, threads=threads)
            return
        with self._packed(sources, destinations) as (given, wanted):
            if observe.counting:
                tell(self._by(len(given[0])), wanted, given)
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

    def _by(self, tensors: int) -> Places:
        """Return who sums each tensor."""
        return [self._reducers[i % len(self._reducers)] for i in range(tensors)]

    def _sum_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """Of tensor i, all n go to reducer i mod m, and one from there to every destination."""
        traffic = Traffic()
        tensors, destinations = self._packed_bytes(traffic, tensors, destinations)
        for i, tensor in enumerate(tensors):
            reducer = self._reducers[i % len(self._reducers)]
            for device in self.devices:
                traffic.go(device, reducer, tensor.nbytes)
            for places in destinations:
                traffic.go(reducer, places[i], tensor.nbytes)
        return traffic

    def _narrow_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        return self._float_bytes(tensors, destinations)
