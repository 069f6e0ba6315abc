"""Algorithm: what all ways to sum have in common, so that each of them is a small file.

An algorithm sums rows of float32 or float64 with at least two replicas. Here such rows are made of
whatever is given: each dtype is a row of its own; float16 and bfloat16 are summed in float32 and
rounded once; integers wrap around, so they have one sum in any order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from minidist import observe
from minidist.comm.base import Communicator
from minidist.comm.orders import FLOAT32, check
from minidist.comm.packing import Packer
from minidist.comm.row import Row, columns, tell
from minidist.comm.scratch import Scratch
from minidist.device import Device
from minidist.dtypes import is_narrow
from minidist.traffic import Outline, Places, Traffic


class Algorithm(Communicator):
    """One way to sum, on devices that reach each other's memory."""

    def __init__(self, devices: Sequence[Device], packer: Packer | None = None) -> None:
        self.devices = tuple(devices)
        self._packer = packer
        self._ops = self.devices[0].ops

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
                given, wanted = columns(sources, members), columns(destinations, members)
            check(dtype, weights, scale)
            if dtype.char in "fd":
                self._floats(given, wanted, weights, scale, threads)
            elif is_narrow(dtype):
                self._narrow(given, wanted, weights, scale, threads)
            else:
                self._whole(given, wanted)

    def _floats(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        if len(sources) == 1:  # who wants it reads it
            if observe.counting:
                for row in destinations:
                    tell(row.devices, [row], sources)
            self._ops.sum(destinations, sources, weights=weights, scale=scale, threads=threads)
        else:
            self._sum(sources, destinations, weights, scale, threads)

    @abstractmethod
    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """Do it, for rows of float32 or float64 of two or more replicas."""

    def _narrow(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        ops = self._ops
        with Scratch() as scratch:
            wide = []
            for row in sources:
                wide.append(scratch.row(row.devices[0], row, FLOAT32))
                ops.convert(wide[-1], row, threads=threads)
            self._floats(wide, wide[:1], weights, scale, threads)
            for destination in destinations:  # who has the sum rounds it
                if observe.counting:
                    tell(wide[0].devices, [destination], [wide[0]])
                ops.convert(destination, wide[0], threads=threads)

    def _whole(self, sources: Sequence[Row], destinations: Sequence[Row]) -> None:
        device = sources[0].devices[0]
        with Scratch() as scratch:
            totals = scratch.row(device, sources[0])  # a destination may be a source
            if observe.counting:
                tell(totals.devices, destinations, sources)
            for i, total in enumerate(totals):
                device.copy(total, sources[0][i])
                for row in sources[1:]:
                    device.ops.accumulate(total, row[i])
                for destination in destinations:
                    device.copy(destination[i], total)

    # --- what algorithms are made of

    def _sum_by(
        self,
        by: Sequence[Device],
        destinations: Sequence[Row],
        sources: Sequence[Row],
        weights: Sequence[float] | None = None,
        scale: float = 1.0,
        *,
        threads: int,
    ) -> None:
        """Let device by[t] sum array t of the sources, and store that in every destination."""
        if observe.counting:
            tell(by, destinations, sources)
        self._ops.sum(destinations, sources, weights=weights, scale=scale, threads=threads)

    def _copy(self, destinations: Sequence[Row], source: Row, threads: int) -> None:
        """Let every destination read a row: a sum of one, since that is shared by threads."""
        if observe.counting:
            for row in destinations:
                tell(row.devices, [row], [source])
        self._ops.sum(destinations, [source], threads=threads)

    def _packed(
        self, sources: Sequence[Row], destinations: Sequence[Row]
    ) -> AbstractContextManager[tuple[Sequence[Row], Sequence[Row]]]:
        """Return what travels for these rows, for the length of a with statement."""
        if self._packer is None:
            return nullcontext((sources, destinations))
        return self._packer.packed(sources, destinations)

    @contextmanager
    def _weighted(
        self, sources: Sequence[Row], weights: Sequence[float] | None, threads: int
    ) -> Iterator[Sequence[Row]]:
        """Give the sources times their weights: for what adds up parts of the sum by themselves."""
        if weights is None:
            yield sources
            return
        with Scratch() as scratch:
            rows = []
            for source, weight in zip(sources, weights, strict=True):
                rows.append(scratch.row(source.devices[0], source))
                self._ops.sum(rows[-1:], [source], weights=[weight], threads=threads)
            yield rows

    # --- what it moves

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        traffic = Traffic()
        for dtype in {tensor.dtype for tensor in tensors}:
            members = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            row = [tensors[i] for i in members]
            wanted = [[places[i] for i in members] for places in destinations]
            kind = self._narrow_bytes if is_narrow(dtype) else self._float_bytes
            traffic.update(kind(row, wanted))
        return traffic

    def _float_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        if len(self.devices) > 1:
            return self._sum_bytes(tensors, destinations)
        traffic = Traffic()
        for places in destinations:
            traffic.each(self._homes(0, tensors), places, tensors)
        return traffic

    @abstractmethod
    def _sum_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """Return what `_sum` moves: the formula of this algorithm."""

    def _narrow_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """All is summed in float32 to the first replica, which hands it out in 16 bits."""
        first = self._homes(0, tensors)
        traffic = self._float_bytes([Outline(one.size, FLOAT32) for one in tensors], [first])
        for places in destinations:
            traffic.each(first, places, tensors)
        return traffic

    def _packed_bytes(
        self, traffic: Traffic, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> tuple[Sequence[Outline], Sequence[Places]]:
        """Return what travels for these; add to `traffic` the way out of the buffers."""
        if self._packer is None:
            return tensors, destinations
        return self._packer.predicted_bytes(traffic, tensors, destinations)

    def _homes(self, replica: int, tensors: Sequence[Outline]) -> Places:
        return [self.devices[replica]] * len(tensors)
