"""Compact: what goes from device to device is rounded to 16 bits.

      replica 0   g0 ─► 16 bits ──┐
      replica 1   g1 ─► 16 bits ──┼─►  sum in float32  ─► 16 bits ──►  every destination
      replica 2   g2 ─► 16 bits ──┘

Each replica's row is rounded once, summed in float32 in the order of whatever algorithm sums it,
and the sum, times weights and scale, is rounded once before it is handed out. What becomes too
large for float16 is infinite; bfloat16 has float32's range.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.base import Communicator, columns
from minidist.comm.scratch import Row, Scratch
from minidist.device import Device
from minidist.dtypes import as_dtype


class Compact(Communicator):
    """All-reduce float32 and float64 rows by another communicator, in 16 bits.

    dtype: "float16" or "bfloat16". Arrays of other dtypes go as they are.
    """

    def __init__(self, devices: Sequence[Device], inner: Communicator, dtype: str) -> None:
        self._devices = tuple(devices)
        self._inner = inner
        self._dtype = as_dtype(dtype)
        self.order = inner.order

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        wide = [i for i, array in enumerate(sources[0]) if array.dtype.char in "fd"]
        rest = [i for i, array in enumerate(sources[0]) if array.dtype.char not in "fd"]
        if rest:
            given, wanted = columns(sources, rest), columns(destinations, rest)
            self._inner._all_reduce(given, wanted, weights, scale, threads)
        if wide:
            given, wanted = columns(sources, wide), columns(destinations, wide)
            self._in_16_bits(given, wanted, weights, scale, threads)

    def _in_16_bits(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        ops = self._devices[0].ops
        with Scratch() as scratch:
            small = []
            for replica, row in enumerate(sources):
                device = self._devices[replica % len(self._devices)]
                small.append(scratch.row(device, row, self._dtype))
                ops.convert(small[-1], row, threads=threads)
            self._inner._all_reduce(small, small[:1], weights, scale, threads)
            for destination in destinations:
                ops.convert(destination, small[0], threads=threads)
