"""Grids: what grid.cuh expects of a launch: how many blocks, and tables of tensors.

A `Machine` is what launches: CuPy in `device/`, and in the tests a GPU of threads on the CPU. An
argument of a kernel is a NumPy number, or an array of one element with the layout of a C struct; an
array of the machine goes as its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from minidist.kernels.source import Module

Array = Any
Tensors = Sequence[Any]
HostArray = np.ndarray[Any, Any]

THREADS = 256  # of a block; grid.cuh's MD_BLOCK
WARPS = THREADS // 32  # of a block
CHUNK = 4096  # elements that a block does at a time; reduce.h's MD_CHUNK
BLOCKS = 1 << 15  # at most; the grid strides over the rest

_TABLE = np.dtype(
    [
        *((name, "u8") for name in ("at", "size", "begin")),
        *((name, "i4") for name in ("rows", "columns", "chunks")),
    ],
    align=True,
)


class Machine(Protocol):
    """What has memory and runs kernels. Work is done in the order in which it is given."""

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: tuple[int, int],
        block: int,
        arguments: Sequence[Any],
    ) -> None:
        """Run a kernel on grid (x, y) blocks of so many threads."""

    def address(self, array: Array) -> int:
        """Return where the first element lies."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array, 16-byte aligned; its memory is free for later work once dropped."""

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Array:
        """Return a new array of one value."""

    def constant(self, array: HostArray) -> Array:
        """Return a copy of a small array that no kernel writes to.

        The same contents may give the same copy, so what is launched at every step alike is copied
        once.
        """


def wide(dtype: str) -> np.dtype[Any]:
    """Return the dtype that elements of a dtype of this name are computed in."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def pointers(machine: Machine, *arrays: Array) -> tuple[np.uint64, ...]:
    """Return arrays as arguments."""
    return tuple(np.uint64(machine.address(array)) for array in arrays)


def struct(dtype: Any, *values: Any) -> HostArray:
    """Return a C struct of numbers, all of one dtype, as an argument."""
    return np.array(tuple(values), np.dtype([(f"f{i}", dtype) for i in range(len(values))]))


def blocks(items: int, each: int) -> tuple[int, int]:
    """Return the grid for so many items of which a block does `each` at a time."""
    return min(-(-items // each), BLOCKS), 1


def launch(
    machine: Machine, module: Module, kernel: str, grid: tuple[int, int], *arguments: Any
) -> None:
    """Run a kernel, unless there is nothing to do for it."""
    if min(grid) > 0:
        machine.launch(module, kernel, grid, THREADS, arguments)


def elements(
    machine: Machine, module: Module, verb: str, arrays: dict[str, Array], *more: Any
) -> None:
    """Launch what is done element by element, over arrays of one size and dtype; `more` follows.

    A ValueError or TypeError names the first array that does not match.
    """
    first = next(iter(arrays.values()))
    for name, array in arrays.items():
        check(verb, name, array, first.dtype, first.size)
    arguments = (np.int64(first.size), *pointers(machine, *arrays.values()), *more)
    launch(machine, module, verb, blocks(first.size, CHUNK), *arguments)


class Table:
    """A list of tensors in several roles: one list per column, as md_grid_table has them.

    `addresses` is [rows, columns], `sizes` the elements of each row.
    """

    def __init__(self, machine: Machine, addresses: HostArray, sizes: Sequence[int]) -> None:
        rows, columns = addresses.shape
        size = np.array(sizes, np.int64)
        end = np.cumsum(-(-size // CHUNK))
        self._machine = machine
        self.chunks = int(end[-1]) if rows else 0
        # All that the struct points to, one behind the other.
        parts = [addresses.ravel(), size, end - -(-size // CHUNK)]
        self._memory = machine.constant(np.concatenate([part.astype(np.uint64) for part in parts]))
        at = machine.address(self._memory)
        size_at = at + 8 * addresses.size
        places = (at, size_at, size_at + 8 * rows)
        self.struct = np.array((*places, rows, columns, self.chunks), _TABLE)

    def launch(self, module: Module, kernel: str, *arguments: Any) -> None:
        """Run a kernel on all tensors."""
        grid = blocks(self.chunks, 1)
        launch(self._machine, module, kernel, grid, self.struct, *arguments)


def check(verb: str, name: str, array: Array, dtype: np.dtype[Any], size: int) -> None:
    """Raise unless the array is contiguous, of this dtype and so many elements."""
    if array.dtype != dtype:
        raise TypeError(f"{verb}: {name} must be {dtype.name}, got {array.dtype.name}")
    if array.size != size:
        raise ValueError(f"{verb}: {name} must have {size} elements, got shape {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{verb}: {name} must be C-contiguous; pass a copy")


def table(
    machine: Machine, verb: str, columns: dict[str, Tensors], types: Sequence[np.dtype[Any]]
) -> Table:
    """Return the table of these columns; `types` are their dtypes.

    A ValueError or TypeError names the first list or array that does not match the others.
    """
    lists = list(columns.items())
    rows = len(lists[0][1])
    for name, arrays in lists:
        if len(arrays) != rows:
            raise ValueError(f"{verb}: {lists[0][0]} has {rows} tensors, but {name} {len(arrays)}")
    sizes = [array.size for array in lists[0][1]]
    addresses = np.empty((rows, len(lists)), np.uint64)
    for column, ((name, arrays), dtype) in enumerate(zip(lists, types, strict=True)):
        for row, array in enumerate(arrays):
            check(verb, f"{name}[{row}]", array, dtype, sizes[row])
            addresses[row, column] = machine.address(array)
    return Table(machine, addresses, sizes)
