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
from typing import Any

from minidist import observe
from minidist.comm.base import Communicator
from minidist.comm.row import Row, columns, tell
from minidist.comm.scratch import Scratch
from minidist.dtypes import as_dtype
from minidist.traffic import Outline, Places, Traffic


class Compact(Communicator):
    """All-reduce float32 and float64 rows by another communicator, in 16 bits.

    dtype: "float16" or "bfloat16". Arrays of other dtypes go as they are.
    """

    def __init__(self, inner: Communicator, dtype: str) -> None:
        self.devices = inner.devices
        self._inner = inner
        self._dtype = as_dtype(dtype)
        self.order = inner.order

    @property
    def replicas(self) -> int:
        return self._inner.replicas

    @property
    def first(self) -> int:
        return self._inner.first

    def close(self) -> None:
        self._inner.close()

    def _heard(
        self, sources: Sequence[Row], weights: Sequence[float] | None
    ) -> tuple[Sequence[Row], Sequence[float] | None]:
        return self._inner._heard(sources, weights)

    def allocate(self, kinds: Sequence[tuple[tuple[int, ...], Any]]) -> Row:
        return self._inner.allocate(kinds)

    def _agree(self, what: str) -> None:
        self._inner._agree(what)

    def _broadcast_rows(self, rows: Sequence[Row], root: int) -> None:
        self._inner._broadcast_rows(rows, root)

    def _gather_rows(self, sources: Sequence[Row]) -> list[Row]:
        return self._inner._gather_rows(sources)

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
        ops = self.devices[0].ops
        with Scratch() as scratch:
            small = []
            for row in sources:
                small.append(scratch.row(row.devices[0], row, self._dtype))
                ops.convert(small[-1], row, threads=threads)
            self._inner._all_reduce(small, small[:1], weights, scale, threads)
            for destination in destinations:  # who wants the sum reads it in 16 bits
                if observe.counting:
                    tell(destination.devices, [destination], [small[0]])
                ops.convert(destination, small[0], threads=threads)

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        """The sum goes to the first replica, and in 16 bits from there to every destination."""
        wide = [i for i, one in enumerate(tensors) if one.dtype.char in "fd"]
        rest = [i for i, one in enumerate(tensors) if one.dtype.char not in "fd"]
        small = [Outline(tensors[i].size, self._dtype) for i in wide]
        first = [self.devices[0]] * len(small)
        traffic = self._inner.predicted_bytes(small, [first])
        for places in destinations:
            traffic.each(first, [places[i] for i in wide], small)
        others = [[places[i] for i in rest] for places in destinations]
        traffic.update(self._inner.predicted_bytes([tensors[i] for i in rest], others))
        return traffic
