"""Communicator for devices that reach each other's memory: one pass sums and stores.

          replica 0   g0 ──┐
          replica 1   g1 ──┼─►  (g0 + g1) + g2  ──►  every destination
          replica 2   g2 ──┘

Each element is added up once, in replica order, and stored into each destination from the register
it was added up in: n reads and one write for each destination. Chunks of elements are spread over
threads; which thread does a chunk changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.base import Communicator, Row
from minidist.device import Device


class LocalCommunicator(Communicator):
    """All-reduce by copy inside one machine."""

    def __init__(self, device: Device) -> None:
        self._ops = device.ops

    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        threads: int,
    ) -> None:
        self._ops.sum(destinations, sources, weights=weights, threads=threads)
