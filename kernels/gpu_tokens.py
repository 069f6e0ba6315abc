"""tokens.pyx on a GPU: layer normalisation of the rows of x [..., columns], and GELU.

GELU has the CPU's bits (but for subnormal numbers, which CuPy's compiler takes for 0); sums over
rows and columns are added up in orders of their own, which depend on the shape alone. Narrow
arrays, float16 or bfloat16, are computed with in float32; scale, offset and their gradients are of
the type that is computed with. Results are written into arrays of the caller.

A TypeError or ValueError names the array of a wrong dtype, size or layout.
"""

from __future__ import annotations

from minidist.kernels.gpu_columns import SUMS, Shape, cut, together
from minidist.kernels.grid import WARPS, Array, Machine, blocks, elements, launch, pointers
from minidist.kernels.source import Module


def gelu(machine: Machine, x: Array, y: Array) -> None:
    """Store x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 in y, which may be x."""
    elements(machine, Module("tokens", x.dtype.name), "gelu", {"x": x, "y": y})


def gelu_backward(machine: Machine, dy: Array, x: Array, dx: Array) -> None:
    """Store dy times the derivative of GELU at x in dx, which may be dy or x."""
    arrays = {"dy": dy, "x": x, "dx": dx}
    elements(machine, Module("tokens", x.dtype.name), "gelu_backward", arrays)


def layer_norm(
    machine: Machine, x: Array, scale: Array, offset: Array, epsilon: float, y: Array
) -> None:
    """Store (x - mean) / sqrt(variance + epsilon) * scale + offset in y, which may be x."""
    columns = {"scale": scale, "offset": offset}
    shape = Shape.of("tokens", "layer_norm", x, {"y": y}, columns)
    given = pointers(machine, x, scale, offset)
    arguments = (*shape.sizes, *given, shape.number(epsilon), *pointers(machine, y))
    launch(machine, shape.module, "layer_norm", blocks(shape.rows, WARPS), *arguments)


def layer_norm_backward(
    machine: Machine,
    dy: Array,
    x: Array,
    scale: Array,
    epsilon: float,
    dx: Array,
    dscale: Array,
    doffset: Array,
) -> None:
    """Store the gradients of layer_norm's x, scale and offset; dx is an array of its own."""
    columns = {"scale": scale, "dscale": dscale, "doffset": doffset}
    shape = Shape.of("tokens", "layer_norm_backward", x, {"dy": dy, "dx": dx}, columns)
    if not shape.columns:
        return
    of_rows = machine.empty((shape.rows, 2), scale.dtype)
    given = (*shape.sizes, *pointers(machine, dy, x, scale), shape.number(epsilon))
    rows = (*given, *pointers(machine, dx, of_rows))
    launch(machine, shape.module, "layer_norm_backward", blocks(shape.rows, WARPS), *rows)
    grid = cut(machine, shape, SUMS, dy, x)
    parts = machine.empty((grid.slabs, shape.columns, 2), scale.dtype)
    sums = (*shape.sizes, *pointers(machine, dy, x, of_rows, parts), *grid.arguments)
    launch(machine, shape.module, "layer_norm_sums", grid.grid, *sums)
    norm = shape._replace(module=shape.module._replace(source="norm"))
    together(machine, norm, "sums_together", grid.slabs, parts, dscale, doffset)
