"""Windows of layer.pyx and depthwise.pyx on a GPU: columns, pooling, depthwise convolution.

Arguments are those of the CPU's verbs: images [n, h, w, c], windows [n, rows, columns, ...],
results written into arrays of the caller. `position` is (kh, kw, stride_h, stride_w, pad_top,
pad_left). Bits are the CPU's too (but for subnormal numbers, which CuPy's compiler takes for 0),
save those of the gradient of depthwise filters. Narrow arrays, float16 or bfloat16, are computed
with in float32, and each result is rounded once.

A TypeError or ValueError names the array of a wrong dtype, size or layout.
"""

from __future__ import annotations

from math import prod

import numpy as np

from minidist.kernels.grid import (
    THREADS,
    Array,
    Machine,
    blocks,
    check,
    launch,
    pointers,
    struct,
    wide,
)
from minidist.kernels.source import Module

Position = tuple[int, int, int, int, int, int]

SLABS = 256  # of windows, at most, among which a sum over all of them is divided
WINDOWS = 64  # of a slab, at least


def im2col(machine: Machine, x: Array, columns: Array, position: Position) -> None:
    """Copy windows of x [n, h, w, c] to columns [n, rows, columns, kh * kw * c]; padding is 0.

    Convolution is then columns.reshape(-1, kh * kw * c) @ filters.reshape(kh * kw * c, -1).
    """
    _launch(machine, "im2col", x, columns, position, {"x": x, "columns": columns})


def col2im(machine: Machine, columns: Array, dx: Array, position: Position) -> None:
    """Store in dx [n, h, w, c] the sum of all that lies over each element: im2col's derivative.

    Of a narrow dx the columns are float32.
    """
    _launch(machine, "col2im", dx, columns, position, {"columns": columns, "dx": dx})


def max_pool(machine: Machine, x: Array, y: Array, argmax: Array, position: Position) -> None:
    """Store the largest of each window in y, and its place, int32 of y's shape, in argmax."""
    _launch(machine, "max_pool", x, y, position, {"x": x, "y": y, "argmax": argmax})


def max_pool_backward(
    machine: Machine, dy: Array, argmax: Array, dx: Array, position: Position
) -> None:
    """Store in dx [n, h, w, c] the sum of dy over the windows that each element won."""
    _launch(machine, "max_pool_backward", dx, dy, position, {"dy": dy, "argmax": argmax, "dx": dx})


def average_pool(machine: Machine, x: Array, y: Array, position: Position) -> None:
    """Store the mean of each window in y; padding does not count."""
    _launch(machine, "average_pool", x, y, position, {"x": x, "y": y})


def average_pool_backward(machine: Machine, dy: Array, dx: Array, position: Position) -> None:
    """Store in dx [n, h, w, c] the sum of dy / count over the windows on each element."""
    _launch(machine, "average_pool_backward", dx, dy, position, {"dy": dy, "dx": dx})


def depthwise(machine: Machine, x: Array, w: Array, y: Array, position: Position) -> None:
    """Store in y the sum of each window of x times the filter w [kh, kw, c], by channel."""
    _launch(machine, "depthwise", x, y, position, {"x": x, "w": w, "y": y})


def depthwise_backward_input(
    machine: Machine, dy: Array, w: Array, dx: Array, position: Position
) -> None:
    """Store in dx [n, h, w, c] the gradient of depthwise's x."""
    arrays = {"dy": dy, "w": w, "dx": dx}
    _launch(machine, "depthwise_backward_input", dx, dy, position, arrays)


def depthwise_backward_filter(
    machine: Machine, x: Array, dy: Array, dw: Array, position: Position
) -> None:
    """Store in dw [kh, kw, c] the gradient of depthwise's w.

    It is added up in an order of its own, which depends on the shape alone.
    """
    windows = prod(dy.shape[:3])
    slabs = min(SLABS, max(windows // WINDOWS, 1))
    parts = machine.empty((slabs, *dw.shape), wide(x.dtype.name))
    given, number = {"x": x, "dy": dy, "parts": parts}, (np.int32(slabs),)
    _launch(machine, "depthwise_parts", x, dy, position, given, number)
    _launch(machine, "depthwise_together", x, dy, position, {"parts": parts, "dw": dw}, number)


def _launch(
    machine: Machine,
    verb: str,
    images: Array,
    windows: Array,
    position: Position,
    arrays: dict[str, Array],
    numbers: tuple[np.int32, ...] = (),
) -> None:
    """Launch a verb on images [n, h, w, c] and windows [n, rows, columns, ...].

    `arrays` are its arguments by name: "argmax" is int32, "columns" that are added up and "parts"
    are of the type that is computed with, all others are of the images' dtype. `numbers` follow.
    """
    n, h, w, c = images.shape
    rows, columns = windows.shape[1:3]
    kh, kw, stride_h, stride_w, pad_top, pad_left = position
    dtype = images.dtype
    if min(kh, kw, stride_h, stride_w) < 1:
        raise ValueError(
            f"{verb}: window {kh}x{kw} and strides {stride_h}x{stride_w} must be positive"
        )
    for size, count, k, stride, before in (
        (h, rows, kh, stride_h, pad_top),
        (w, columns, kw, stride_w, pad_left),
    ):
        if count and not (before < k and (count - 1) * stride - before < size):
            raise ValueError(
                f"{verb}: some of the {rows}x{columns} windows of {kh}x{kw}, strides "
                f"{stride_h}x{stride_w}, padding {pad_top} above and {pad_left} to the left, "
                f"lie wholly outside of images of {h}x{w}"
            )
    places = n * rows * columns * c
    sizes = {"x": n * h * w * c, "dx": n * h * w * c, "columns": places * kh * kw}
    sizes |= dict.fromkeys(("w", "dw"), kh * kw * c)
    if "parts" in arrays:
        sizes["parts"] = arrays["parts"].size
    types = {"argmax": np.dtype(np.int32), "parts": wide(dtype.name)}
    if verb == "col2im":
        types["columns"] = wide(dtype.name)
    for name, array in arrays.items():
        check(verb, name, array, types.get(name, dtype), sizes.get(name, places))
    results = next(reversed(arrays.values())).size
    geometry = struct("i8", n, h, w, c, rows, columns, *position)
    grid = blocks(results, THREADS)
    launch(
        machine,
        Module("window", dtype.name),
        verb,
        grid,
        geometry,
        *pointers(machine, *arrays.values()),
        *numbers,
    )
