"""Batch norm on a GPU: moments of the columns of x [rows, columns], normalisation, its gradients.

Moments are taken in one pass over x. Sums are added up in an order of their own, which depends on
the shape alone. Narrow arrays, float16 or bfloat16, are computed with in float32; mean, variance,
scale, offset and their gradients, [columns], are of the type that is computed with. Results are
written into arrays of the caller, y or dx also in place.

A TypeError or ValueError names the array of a wrong dtype, size or layout.
"""

from __future__ import annotations

import numpy as np

from minidist.kernels.gpu_columns import BLOCKS, SUMS, Shape, cut, places, together
from minidist.kernels.grid import Array, Machine, launch, pointers


def moments(machine: Machine, x: Array, mean: Array, variance: Array) -> None:
    """Store the mean and the biased variance of each column; 0 and 0 of no rows."""
    shape = Shape.of("norm", "moments", x, {}, {"mean": mean, "variance": variance})
    if not shape.columns:
        return
    grid = cut(machine, shape, SUMS, x)
    parts = machine.empty((grid.slabs, shape.columns, 3), mean.dtype)
    arguments = (*shape.sizes, *pointers(machine, x, parts), *grid.arguments)
    launch(machine, shape.module, "moments", grid.grid, *arguments)
    together(machine, shape, "moments_together", grid.slabs, parts, mean, variance)


def normalize(
    machine: Machine,
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array,
    offset: Array,
    epsilon: float,
    y: Array,
    add: Array | None = None,
    relu: bool = False,
) -> None:
    """Store (x - mean) / sqrt(variance + epsilon) * scale + offset in y.

    To that `add`, like x, is added; then the ReLU is taken.
    """
    columns = {"mean": mean, "variance": variance, "scale": scale, "offset": offset}
    shape = Shape.of("norm", "normalize", x, {"y": y, "add": add}, columns)
    if not x.size:
        return
    grid = cut(machine, shape, BLOCKS, x, y, add)
    given = pointers(machine, x, mean, variance, scale, offset)
    more = (*places(machine, add), np.bool_(relu), *pointers(machine, y))
    arguments = (*shape.sizes, *given, shape.number(epsilon), *more)
    launch(machine, shape.module, "normalize", grid.grid, *arguments, *grid.arguments)


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
    y: Array | None = None,
    dz: Array | None = None,
) -> None:
    """Store the gradients of normalize's x, scale and offset, and of add in dz, if it is given.

    With `moments`, mean and variance are those of x itself and depend on it. Given y, the ReLU's
    result, dy counts where y > 0 only.
    """
    columns = {
        "mean": mean,
        "variance": variance,
        "scale": scale,
        "dscale": dscale,
        "doffset": doffset,
    }
    images = {"dy": dy, "dx": dx, "y": y, "dz": dz}
    shape = Shape.of("norm", "normalize_backward", x, images, columns)
    if not shape.columns:
        return
    number = shape.number(epsilon)
    grid = cut(machine, shape, SUMS, dy, x, y, dz)
    parts = machine.empty((grid.slabs, shape.columns, 2), scale.dtype)
    given = (*places(machine, dy, x, y), *pointers(machine, mean, variance))
    sums = (*shape.sizes, *given, number, *places(machine, dz, parts))
    launch(machine, shape.module, "normalize_sums", grid.grid, *sums, *grid.arguments)
    together(machine, shape, "sums_together", grid.slabs, parts, dscale, doffset)
    if not shape.rows:
        return
    if dz is not None:
        dy, y = dz, None
    grid = cut(machine, shape, BLOCKS, dy, x, y, dx)
    given = (*places(machine, dy, x, y), *pointers(machine, mean, variance, scale, dscale, doffset))
    per_row = shape.number(1 / shape.rows if moments else 0)
    arguments = (*shape.sizes, *given, number, per_row, *pointers(machine, dx))
    launch(machine, shape.module, "normalize_backward", grid.grid, *arguments, *grid.arguments)
