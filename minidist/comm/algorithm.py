"""Algorithm: what all ways to sum have in common, so that each of them is a small file.

An algorithm sums rows of float32 or float64 with at least two replicas. Here such rows are made of
whatever is given: each dtype is a row of its own; float16 and bfloat16 are summed in float32 and
rounded once; integers wrap around, so they have one sum in any order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from minidist.comm.base import Communicator, columns
from minidist.comm.packing import Packer
from minidist.comm.scratch import Row, Scratch
from minidist.device import Device
from minidist.dtypes import is_narrow
from minidist.errors import ShapeError

FLOAT32 = np.dtype(np.float32)


class Algorithm(Communicator):
    """One way to sum, on devices that reach each other's memory."""

    def __init__(self, devices: Sequence[Device], packer: Packer | None = None) -> None:
        self._devices = tuple(devices)
        self._packer = packer
        self._ops = self._devices[0].ops

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
            if dtype.char in "fd":
                self._floats(given, wanted, weights, scale, threads)
            elif is_narrow(dtype):
                self._narrow(given, wanted, weights, scale, threads)
            elif dtype.kind in "iu" and weights is None and scale == 1:
                self._whole(given, wanted)
            else:
                raise ShapeError(
                    f"all_reduce: {dtype} cannot be added up"
                    + (" with weights or a scale" if dtype.kind in "iu" else "")
                    + "; convert it with ops.cast"
                )

    def _floats(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        if len(sources) == 1:
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
            for replica, row in enumerate(sources):
                wide.append(scratch.row(self._device(replica), row, FLOAT32))
                ops.convert(wide[-1], row, threads=threads)
            self._floats(wide, wide[:1], weights, scale, threads)
            for destination in destinations:
                ops.convert(destination, wide[0], threads=threads)

    def _whole(self, sources: Sequence[Row], destinations: Sequence[Row]) -> None:
        device = self._devices[0]
        with Scratch() as scratch:
            totals = scratch.row(device, sources[0])  # a destination may be a source
            for i, total in enumerate(totals):
                device.copy(total, sources[0][i])
                for row in sources[1:]:
                    device.ops.accumulate(total, row[i])
                for destination in destinations:
                    device.copy(destination[i], total)

    # --- what algorithms are made of

    def _device(self, replica: int) -> Device:
        return self._devices[replica % len(self._devices)]

    def _packed(
        self, sources: Sequence[Row], destinations: Sequence[Row]
    ) -> AbstractContextManager[tuple[Sequence[Row], Sequence[Row]]]:
        """Return what travels for these rows, for the length of a with statement."""
        if self._packer is None:
            return nullcontext((sources, destinations))
        return self._packer.packed(sources, destinations, self._devices)

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
            for replica, (source, weight) in enumerate(zip(sources, weights, strict=True)):
                rows.append(scratch.row(self._device(replica), source))
                self._ops.sum(rows[-1:], [source], weights=[weight], threads=threads)
            yield rows

    def _copy(self, destinations: Sequence[Row], source: Row, threads: int) -> None:
        """Copy a row into others: a sum of one, since that is shared by threads."""
        self._ops.sum(destinations, [source], threads=threads)
