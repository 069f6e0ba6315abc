"""Buffers: what the replicas of this process give to a verb and get from it, filled and checked.

A replica's arrays are on its device. In place, what it gives and what it gets are the same memory:
of all_gather the part that it gives is in its place in the whole that it gets, of reduce_scatter
the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm_bench import data
from minidist.comm_bench.verbs import Verb
from minidist.device import Array, Device
from minidist.dtypes import HostArray, as_dtype


class Buffers:
    """Arrays for one verb.

    gives, gets: for each replica of this process its array, None where it gives or gets nothing.
    size: elements of the whole, of which a part is an n-th for n replicas; what does not divide by
    n is left out. first: the number of this process's first replica among all.
    """

    def __init__(
        self,
        verb: Verb,
        dtype: str,
        size: int,
        op: str,
        *,
        devices: Sequence[Device],
        replicas: int,
        first: int = 0,
        root: int = 0,
        in_place: bool = False,
    ) -> None:
        self.verb, self.dtype, self.op, self.root = verb, as_dtype(dtype), op, root
        self.replicas, self.in_place = replicas, in_place
        self.part = size // replicas if verb.parts else size
        self.size = self.part * replicas if verb.parts else size
        self.devices = tuple(devices)
        self.numbers = range(first, first + len(devices))
        self._taken: list[Array] | None = None
        self.gives: list[Array | None] = []
        self.gets: list[Array | None] = []
        for device, number in zip(self.devices, self.numbers, strict=True):
            gives, gets = self._allocate(device, number)
            self.gives.append(gives)
            self.gets.append(gets)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole, which bandwidths are of."""
        return self.size * int(self.dtype.itemsize)

    def _allocate(self, device: Device, number: int) -> tuple[Array | None, Array | None]:
        name = self.verb.name
        gives = self.part if name == "all_gather" else self.size
        gets = self.part if name == "reduce_scatter" else self.size
        given = got = None
        if name != "broadcast" or number == self.root:
            given = device.allocate((gives,), self.dtype)
        if name != "reduce" or number == self.root:
            got = device.allocate((gets,), self.dtype)
        if self.in_place and given is not None and got is not None:
            part = slice(number * self.part, (number + 1) * self.part)
            if name == "all_gather":
                given = got[part]
            elif name == "reduce_scatter":
                got = given[part]
            else:
                got = given
        return given, got

    def take(self, gather: Callable[[Any], Sequence[Sequence[Array]]], gives: Any) -> None:
        """Let `gather` return what everybody gives, in place of all that is got here."""
        self._taken = [array for row in gather(gives) for array in row]

    # --- rounds

    def rest(self) -> None:
        """Fill everything with zeros, which stay zeros however often the verb is done in place."""
        for arrays in (self.gives, self.gets):
            for device, array in zip(self.devices, arrays, strict=True):
                if array is not None:
                    device.copy(array, np.zeros(array.shape, self.dtype))

    def fill(self, round_: int) -> None:
        """Give every replica what it brings in a round; what it gets is wrong."""
        for device, array in zip(self.devices, self.gets, strict=True):
            if array is not None:
                device.copy(array, data.spoiled(array.shape, self.dtype))
        for device, number, array in zip(self.devices, self.numbers, self.gives, strict=True):
            if array is not None:
                device.copy(array, self._brought(number, round_))

    def wrong(self, round_: int) -> int:
        """Return how many elements are not what they must be after a round.

        Of what is only given too, where that is memory of its own: a verb must not write there.
        """
        wrong = 0
        if self._taken is not None:
            taken = np.concatenate([self.devices[0].copy_out(array) for array in self._taken])
            wrong += data.wrong(taken, self._right(0, round_, None))
        total = self._total(round_) if self.verb.sums else None
        for i, (device, number) in enumerate(zip(self.devices, self.numbers, strict=True)):
            gets, gives = self.gets[i], self.gives[i]
            if gets is not None and self._taken is None:
                wrong += data.wrong(device.copy_out(gets), self._right(number, round_, total))
            if gives is not None and not (self.in_place and gets is not None):
                wrong += data.wrong(device.copy_out(gives), self._brought(number, round_))
        return wrong

    def _brought(self, number: int, round_: int) -> HostArray:
        size = self.part if self.verb.name == "all_gather" else self.size
        return data.brought(self.dtype, size, self.op, self.replicas, number, round_)

    def _total(self, round_: int) -> HostArray:
        return data.result(self.dtype, self.size, self.op, self.replicas, round_)

    def _right(self, number: int, round_: int, total: HostArray | None) -> HostArray:
        if total is None:
            if self.verb.name == "broadcast":
                return self._brought(self.root, round_)
            return np.concatenate([self._brought(k, round_) for k in range(self.replicas)])
        if self.verb.name == "reduce_scatter":
            return total[number * self.part : (number + 1) * self.part]
        return total
