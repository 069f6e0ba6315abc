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

from minidist.comm.base import Communicator
from minidist.comm.packing import Row
from minidist.errors import ShapeError


class LocalCommunicator(Communicator):
    """All-reduce by copy inside one machine."""

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        dtypes = {array.dtype for array in sources[0]}
        for dtype in dtypes:
            given, wanted = sources, destinations
            if len(dtypes) > 1:
                members = [i for i, array in enumerate(sources[0]) if array.dtype == dtype]
                given, wanted = _columns(sources, members), _columns(destinations, members)
            if dtype.char in "fd":
                self._device.ops.sum(wanted, given, weights=weights, scale=scale, threads=threads)
            elif dtype.kind == "f":
                self._narrow(given, wanted, weights, scale, threads)
            elif dtype.kind in "iu" and weights is None and scale == 1:
                self._whole(given, wanted)
            else:
                raise ShapeError(
                    f"all_reduce: {dtype} cannot be added up"
                    + (" with weights or a scale" if dtype.kind in "iu" else "")
                    + "; convert it with ops.cast"
                )

    def _narrow(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """Sum a dtype narrower than float32: computed in float32 and rounded once."""
        ops = self._device.ops
        wide = [[ops.cast(array, "float32") for array in row] for row in sources]
        self._all_reduce(wide, wide[:1], weights, scale, threads)
        for destination in destinations:
            for into, total in zip(destination, wide[0], strict=True):
                self._device.copy(into, ops.cast(total, into.dtype))

    def _whole(self, sources: Sequence[Row], destinations: Sequence[Row]) -> None:
        """Sum integers, which wrap around as integers do."""
        ops = self._device.ops
        for i, first in enumerate(sources[0]):
            total = ops.copy(first)  # a destination may be a source
            for row in sources[1:]:
                ops.accumulate(total, row[i])
            for destination in destinations:
                self._device.copy(destination[i], total)


def _columns(rows: Sequence[Row], members: Sequence[int]) -> list[Row]:
    return [[row[i] for i in members] for row in rows]
