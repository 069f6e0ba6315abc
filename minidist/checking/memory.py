"""Memory: who touched which bytes of a buffer last.

A buffer is what was allocated at once; views of it share its memory. Its bytes are cut wherever an
access began or ended, so that each *cell* was always touched as a whole; it knows the last write
and the reads since, one of each actor (Flanagan and Freund 2009 need less, and tell less).

A buffer is known by the array that owns the memory and forgotten with it, so what the allocator
puts at the same address later is another buffer.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.checking.clocks import Clock
from minidist.checking.places import Access
from minidist.device.cpu import Tied
from minidist.dtypes import HostArray


class Cell:
    """Some bytes: the last write, and the last reads since then by the actors' numbers."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Access | None, reads: dict[int, Access]) -> None:
        self.write = write
        self.reads = reads


class Buffer:
    """What was allocated at once, from address `low` on."""

    __slots__ = ("cells", "events", "freed", "poisoned", "released", "starts", "whose")

    def __init__(self, owner: HostArray, whose: weakref.ref[HostArray]) -> None:
        self.whose = whose
        low, high = span(owner)
        self.starts = [low, high]
        self.cells = [Cell(None, {}), Cell(None, {})]  # of each start; the last has no bytes
        self.freed: Access | None = None  # who gave it back to a pool that it is in now
        self.released: Clock | None = None
        self.events: Sequence[Any] = ()  # after which it may be used again
        self.poisoned = False

    def between(self, start: int, end: int) -> list[Cell]:
        """Return the cells that cover these bytes."""
        first = self._cut(start)
        if self.starts[first + 1] == end:  # mostly the whole of what is there
            return self.cells[first : first + 1]
        return self.cells[first : self._cut(end)]

    def _cut(self, address: int) -> int:
        """Return the number of the cell that begins at an address, made if it must be."""
        starts = self.starts
        i = bisect_left(starts, address)
        if i == len(starts) or starts[i] != address:
            starts.insert(i, address)
            before = self.cells[i - 1]
            self.cells.insert(i, Cell(before.write, dict(before.reads)))
        return i

    def forget_reads(self) -> None:
        for cell in self.cells:
            cell.reads = {}


class Memory:
    """All buffers, by who owns the memory."""

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}

    def buffer(self, array: HostArray) -> Buffer:
        owner = owner_of(array)
        key = id(owner)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.whose() is not owner:
            buffers = self._buffers

            def forget(whose: weakref.ref[HostArray]) -> None:
                last = buffers.get(key)
                if last is not None and last.whose is whose:
                    del buffers[key]

            buffer = buffers[key] = Buffer(owner, weakref.ref(owner, forget))
        return buffer


def owner_of(array: HostArray) -> HostArray:
    """Return the array that owns the memory, or the last one on the way to who does."""
    while True:
        base: Any = array.base
        if isinstance(base, Tied):
            base = base.array
        elif isinstance(base, memoryview):
            base = base.obj
        if not isinstance(base, np.ndarray):
            return array
        array = base


def span(array: HostArray) -> tuple[int, int]:
    """Return the first address of an array and the one behind its last."""
    if array.flags.c_contiguous:
        start: int = array.__array_interface__["data"][0]
        return start, start + array.nbytes
    return np.lib.array_utils.byte_bounds(array)


def poison(array: HostArray) -> None:
    """Fill an array with bytes that are NaN in floating point, and −1 in integers."""
    array.reshape(-1).view(np.uint8).fill(0xFF)
