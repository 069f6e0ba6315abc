"""Bias and ReLU on a GPU: of x [rows, columns] and a number for each column, forwards and back.

Narrow arrays, float16 or bfloat16, are computed with in float32, and results are rounded once. Sums
are added up in an order of their own, which depends on the shape alone.

A TypeError or ValueError names the array of a wrong dtype, size or layout.
"""

from __future__ import annotations

import numpy as np

from minidist.kernels.gpu_columns import BLOCKS, SUMS, Shape, cut, places, together
from minidist.kernels.grid import Array, Machine, check, launch, pointers, wide


def bias(machine: Machine, x: Array, bias: Array, y: Array, *, relu: bool = False) -> None:
    """Store x + bias, or its ReLU, in y, which may be x.

    x is of y's dtype, or of the one that is computed with, as a matrix product leaves it.
    """
    shape = Shape.of("bias", "bias", y, {}, {"bias": bias}, y.dtype)
    narrow = x.dtype == y.dtype
    check("bias", "x", x, y.dtype if narrow else wide(y.dtype.name), y.size)
    if not y.size:
        return
    grid = cut(machine, shape, BLOCKS, x, bias, y)
    arguments = (*shape.sizes, *pointers(machine, x, bias), np.bool_(relu), *pointers(machine, y))
    kernel = "bias" if narrow else "bias_wide"
    launch(machine, shape.module, kernel, grid.grid, *arguments, *grid.arguments)


def bias_backward(
    machine: Machine, dy: Array, dbias: Array, y: Array | None = None, dz: Array | None = None
) -> None:
    """Store the sums of dy over all rows in dbias, and what counts of dy in dz, if it is given.

    That is all of it; given y, the ReLU's result, what is where y > 0, else 0. dz may be dy.
    """
    shape = Shape.of("bias", "bias_backward", dy, {"y": y, "dz": dz}, {"dbias": dbias}, dy.dtype)
    if not shape.columns:
        return
    grid = cut(machine, shape, SUMS, dy, y, dz)
    parts = machine.empty((grid.slabs, shape.columns), wide(dy.dtype.name))
    arguments = (*shape.sizes, *places(machine, dy, y, dz), *pointers(machine, parts))
    launch(machine, shape.module, "bias_sums", grid.grid, *arguments, *grid.arguments)
    together(machine, shape, "bias_together", grid.slabs, parts, dbias)
