"""Memory: who touched which bytes of a buffer last.

A buffer is what was allocated at once; views of it share its memory. Its bytes are cut wherever an
access began or ended, so that each *cell* was always touched as a whole; it knows the last write
and the reads since, one of each actor (Flanagan and Freund 2009 need less, and tell less).

A buffer is known by who owns the memory, an array or a GPU's block, and forgotten with it, so what
the allocator puts at the same address later is another buffer.

Of a GPU there is besides one buffer of all its addresses, for what its streams do with them: they
do it later than threads say so, and memory that one has dropped may still be read when it has
become another block.
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

    def __init__(self, low: int, high: int, whose: weakref.ref[Any] | None = None) -> None:
        self.whose = whose
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

    def renew(self, start: int, end: int, cell: Cell) -> None:
        """Forget what was done with some bytes: they are one cell from now on."""
        first, last = self._cut(start), self._cut(end)
        self.starts[first + 1 : last] = []
        self.cells[first:last] = [cell]

    def forget_reads(self) -> None:
        for cell in self.cells:
            cell.reads = {}


class Memory:
    """All buffers, by who owns the memory, and those of GPUs' addresses, by the GPU's number."""

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}
        self._gpus: dict[int, Buffer] = {}

    def of_gpu(self, gpu: int) -> Buffer:
        if gpu not in self._gpus:
            self._gpus[gpu] = Buffer(0, 1 << 64)
        return self._gpus[gpu]

    def buffer(self, array: Any) -> Buffer:
        return self.buffer_of(owner_of(array))

    def buffer_of(self, owner: Any) -> Buffer:
        key = id(owner)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.whose is None or buffer.whose() is not owner:
            buffers = self._buffers

            def forget(whose: weakref.ref[Any]) -> None:
                last = buffers.get(key)
                if last is not None and last.whose is whose:
                    del buffers[key]

            buffer = buffers[key] = Buffer(*extent(owner), weakref.ref(owner, forget))
        return buffer


def on_gpu(array: Any) -> bool:
    return not isinstance(array, np.ndarray)


def owner_of(array: Any) -> Any:
    """Return the array that owns the memory, or the last one on the way to who does; or a block."""
    if on_gpu(array):
        return array.data.mem.block
    while True:
        base: Any = array.base
        if isinstance(base, Tied):
            base = base.array
        elif isinstance(base, memoryview):
            base = base.obj
        if not isinstance(base, np.ndarray):
            return array
        array = base


def extent(owner: Any) -> tuple[int, int]:
    """Return the first address of an array or block, and the one behind its last."""
    return span(owner) if isinstance(owner, np.ndarray) else (owner.ptr, owner.ptr + owner.size)


def span(array: Any) -> tuple[int, int]:
    """Return the first address of an array and the one behind its last."""
    start: int
    if array.flags.c_contiguous:
        start = array.data.ptr if on_gpu(array) else array.__array_interface__["data"][0]
        return start, start + array.nbytes
    if not on_gpu(array):
        return np.lib.array_utils.byte_bounds(array)
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    start = array.data.ptr + sum(step for step in steps if step < 0)
    return start, start + sum(map(abs, steps)) + array.itemsize


def poison(array: HostArray) -> None:
    """Fill an array with bytes that are NaN in floating point, and −1 in integers."""
    array.reshape(-1).view(np.uint8).fill(0xFF)
