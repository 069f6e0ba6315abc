"""Columns: a convolution's images walked in blocks, whose windows lie as rows in one memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from minidist.device.base import Array
from minidist.device.ops import Shape, Window


def blocks(
    x_shape: Shape,
    window: Window,
    itemsize: int,
    nbytes: int,
    allocate: Callable[[Shape], Array],
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield (images, columns, the same memory as a matrix); the memory is used again each time.

    nbytes: of columns at a time, if those of one image are not more. allocate: gives the memory.
    The blocks depend on shapes alone, so the same input gives the same bits.
    """
    images, channels = x_shape[0], x_shape[3]
    row = prod(window.size) * channels
    each = max(prod(window.output) * row * itemsize, 1)
    step = max(min(nbytes // each, images), 1)
    memory = allocate((step, *window.output, row))
    for first in range(0, images, step):
        part = slice(first, min(first + step, images))
        columns = memory[: part.stop - first]
        yield part, columns, columns.reshape(prod(columns.shape[:3]), row)
