"""Columns: what columns.cuh expects of a launch over arrays of x's shape [rows, columns]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidist.kernels.grid import THREADS, Array, Machine, check, launch, pointers, wide
from minidist.kernels.source import Module

SUMS = 1024  # blocks among which rows are divided to be added up, about
BLOCKS = 1 << 14  # and to be changed
ROWS = 8  # that a thread does at least, where there are that many


class Shape(NamedTuple):
    """Of x [rows, columns], and the module for its dtype."""

    rows: int
    columns: int
    itemsize: int
    module: Module

    @classmethod
    def of(
        cls,
        source: str,
        verb: str,
        x: Array,
        like_x: dict[str, Array | None],
        per_column: dict[str, Array],
        of: np.dtype[Any] | None = None,
    ) -> Shape:
        """Check all arrays that are there against x [..., columns].

        of: the dtype of what each column has; that of what is computed with if not given.
        """
        dtype, columns = x.dtype, x.shape[-1]
        for name, array in {"x": x, **like_x}.items():
            if array is not None:
                check(verb, name, array, dtype, x.size)
        for name, array in per_column.items():
            check(verb, name, array, of or wide(dtype.name), columns)
        rows = x.size // columns if columns else 0
        return cls(rows, columns, dtype.itemsize, Module(source, dtype.name))

    @property
    def sizes(self) -> tuple[np.int64, np.int64]:
        return np.int64(self.rows), np.int64(self.columns)

    @property
    def number(self) -> Any:
        return wide(self.module.dtype).type


class Cut(NamedTuple):
    """How a grid is laid over the columns, `across` threads a block, and the rows, in slabs."""

    grid: tuple[int, int]
    across: int
    packed: bool

    @property
    def slabs(self) -> int:
        return self.grid[1]

    @property
    def arguments(self) -> tuple[np.int32, np.bool_]:
        return np.int32(self.across), np.bool_(self.packed)


def cut(machine: Machine, shape: Shape, most: int, *images: Array | None) -> Cut:
    """Return the grid for passes over those of these arrays that are there.

    They are of x's shape, or of one element for each column. It has about `most` blocks.
    """
    width = 16 // shape.itemsize
    addresses = (machine.address(array) for array in images if array is not None)
    packed = shape.columns % width == 0 and all(address % 16 == 0 for address in addresses)
    packs = shape.columns // width if packed else shape.columns
    across = min(32, 1 << (packs - 1).bit_length())
    wide_blocks = -(-packs // across)
    needed = -(-shape.rows // (THREADS // across * ROWS))
    return Cut((wide_blocks, max(min(needed, most // wide_blocks), 1)), across, packed)


def places(machine: Machine, *arrays: Array | None) -> tuple[np.uint64, ...]:
    """Return arrays as arguments, null for those that are not there."""
    return tuple(np.uint64(0 if a is None else machine.address(a)) for a in arrays)


def together(
    machine: Machine, shape: Shape, kernel: str, slabs: int, parts: Array, *results: Array
) -> None:
    """Launch what takes the slabs' parts together: a grid of one row."""
    across = min(32, 1 << (shape.columns - 1).bit_length())
    grid = (-(-shape.columns // across), 1)
    sizes = np.int64(slabs), np.int64(shape.columns)
    arrays = pointers(machine, parts, *results)
    launch(machine, shape.module, kernel, grid, *sizes, *arrays, np.int32(across))
