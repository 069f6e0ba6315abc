"""Batch norm on a GPU: moments of the columns of x [rows, columns], normalisation, its gradients.

Moments are taken in one pass over x. Sums are added up in an order of their own, which depends on
the shape alone. Narrow arrays, float16 or bfloat16, are computed with in float32; mean, variance,
scale, offset and their gradients, [columns], are of the type that is computed with. Results are
written into arrays of the caller, y or dx also in place.

A TypeError or ValueError names the array of a wrong dtype, size or layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidist.kernels.grid import THREADS, Array, Machine, check, launch, pointers, wide
from minidist.kernels.source import Module

_SUMS = 1024  # blocks among which rows are divided to be added up, about
_BLOCKS = 1 << 14  # and to be changed
_ROWS = 8  # that a thread does at least, where there are that many


def moments(machine: Machine, x: Array, mean: Array, variance: Array) -> None:
    """Store the mean and the biased variance of each column; 0 and 0 of no rows."""
    shape = _Shape.of("moments", x, {}, {"mean": mean, "variance": variance})
    if not shape.columns:
        return
    cut = _cut(machine, shape, _SUMS, x)
    parts = machine.empty((cut.slabs, shape.columns, 3), mean.dtype)
    arguments = (*shape.sizes, *pointers(machine, x, parts), *cut.arguments)
    launch(machine, shape.module, "moments", cut.grid, *arguments)
    _together(machine, shape, "moments_together", cut.slabs, parts, mean, variance)


def normalize(
    machine: Machine,
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array,
    offset: Array,
    epsilon: float,
    y: Array,
) -> None:
    """Store (x - mean) / sqrt(variance + epsilon) * scale + offset in y."""
    columns = {"mean": mean, "variance": variance, "scale": scale, "offset": offset}
    shape = _Shape.of("normalize", x, {"y": y}, columns)
    if not x.size:
        return
    cut = _cut(machine, shape, _BLOCKS, x, y)
    given = pointers(machine, x, mean, variance, scale, offset)
    arguments = (*shape.sizes, *given, shape.number(epsilon), *pointers(machine, y))
    launch(machine, shape.module, "normalize", cut.grid, *arguments, *cut.arguments)


def normalize_backward(
    machine: Machine,
    dy: Array,
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array,
    epsilon: float,
    moments: bool,
    dx: Array,
    dscale: Array,
    doffset: Array,
) -> None:
    """Store the gradients of normalize's x, scale and offset.

    With `moments`, mean and variance are those of x itself and depend on it.
    """
    columns = {
        "mean": mean,
        "variance": variance,
        "scale": scale,
        "dscale": dscale,
        "doffset": doffset,
    }
    shape = _Shape.of("normalize_backward", x, {"dy": dy, "dx": dx}, columns)
    if not shape.columns:
        return
    number = shape.number(epsilon)
    cut = _cut(machine, shape, _SUMS, dy, x)
    parts = machine.empty((cut.slabs, shape.columns, 2), scale.dtype)
    sums = (*pointers(machine, dy, x, mean, variance), number, *pointers(machine, parts))
    launch(machine, shape.module, "normalize_sums", cut.grid, *shape.sizes, *sums, *cut.arguments)
    _together(machine, shape, "sums_together", cut.slabs, parts, dscale, doffset)
    if not shape.rows:
        return
    cut = _cut(machine, shape, _BLOCKS, dy, x, dx)
    given = pointers(machine, dy, x, mean, variance, scale, dscale, doffset)
    per_row = shape.number(1 / shape.rows if moments else 0)
    arguments = (*shape.sizes, *given, number, per_row, *pointers(machine, dx))
    launch(machine, shape.module, "normalize_backward", cut.grid, *arguments, *cut.arguments)


class _Shape(NamedTuple):
    """Of x: its length, and the module for its dtype."""

    rows: int
    columns: int
    module: Module

    @classmethod
    def of(
        cls, verb: str, x: Array, like_x: dict[str, Array], per_column: dict[str, Array]
    ) -> _Shape:
        """Check all arrays against x [..., columns]."""
        dtype, columns = x.dtype, x.shape[-1]
        for name, array in {"x": x, **like_x}.items():
            check(verb, name, array, dtype, x.size)
        for name, array in per_column.items():
            check(verb, name, array, wide(dtype.name), columns)
        return cls(x.size // columns if columns else 0, columns, Module("norm", dtype.name))

    @property
    def sizes(self) -> tuple[np.int64, np.int64]:
        return np.int64(self.rows), np.int64(self.columns)

    @property
    def number(self) -> Any:
        return wide(self.module.dtype).type


class _Cut(NamedTuple):
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


def _cut(machine: Machine, shape: _Shape, most: int, *images: Array) -> _Cut:
    """Return the grid for passes over these arrays of x's shape; it has about `most` blocks."""
    width = 16 // images[0].dtype.itemsize
    addresses = (machine.address(array) for array in images)
    packed = shape.columns % width == 0 and all(address % 16 == 0 for address in addresses)
    packs = shape.columns // width if packed else shape.columns
    across = min(32, 1 << (packs - 1).bit_length())
    wide_blocks = -(-packs // across)
    needed = -(-shape.rows // (THREADS // across * _ROWS))
    return _Cut((wide_blocks, max(min(needed, most // wide_blocks), 1)), across, packed)


def _together(
    machine: Machine, shape: _Shape, kernel: str, slabs: int, parts: Array, *results: Array
) -> None:
    """Launch what takes the slabs' parts together: a grid of one row."""
    across = min(32, 1 << (shape.columns - 1).bit_length())
    grid = (-(-shape.columns // across), 1)
    sizes = np.int64(slabs), np.int64(shape.columns)
    arrays = pointers(machine, parts, *results)
    launch(machine, shape.module, kernel, grid, *sizes, *arrays, np.int32(across))
