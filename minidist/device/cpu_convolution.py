"""Convolution on a CPU: columns of a few images at a time, multiplied by BLAS.

im2col writes each window of the image as a row, [n·oh·ow, kh·kw·c]; then a convolution is one
matrix product with the filter seen as [kh·kw·c, k], and its gradients are two more. The rows of a
whole batch can be hundreds of megabytes, so the batch is walked in blocks whose columns stay in
the cache; writing them again for the gradient is then cheaper than keeping them. The blocks depend
on shapes alone, so the same input gives the same bits.

A 1×1 filter with stride 1 needs no columns: the image is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.device.ops import Shape, Window
from minidist.kernels import layer

_BLOCK_BYTES = 1 << 20  # of columns at a time: they stay in a core's second-level cache


def convolve(x: Array, w: Array, window: Window) -> Array:
    """[n, h, w, c] and [kh, kw, c, k] -> [n, oh, ow, k]."""
    y = np.empty((len(x), *window.output, w.shape[3]), x.dtype)
    if _is_pointwise(window):
        np.matmul(x.reshape(-1, x.shape[3]), w[0, 0], out=y.reshape(-1, y.shape[3]))
        return y
    matrix = w.reshape(-1, w.shape[3])
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        layer.im2col(x[part], columns, *window.position)
        np.matmul(rows, matrix, out=y[part].reshape(len(rows), -1))
    return y


def convolve_input(dy: Array, w: Array, x_shape: Shape, window: Window) -> Array:
    """Gradient of the image: each column adds to the window that it came from."""
    dx = np.empty(x_shape, dy.dtype)
    if _is_pointwise(window):
        np.matmul(dy.reshape(-1, dy.shape[3]), w[0, 0].T, out=dx.reshape(-1, x_shape[3]))
        return dx
    matrix = w.reshape(-1, w.shape[3]).T
    for part, columns, rows in _blocks(x_shape, dy.dtype, window):
        np.matmul(dy[part].reshape(len(rows), -1), matrix, out=rows)
        layer.col2im(columns, dx[part], *window.position)
    return dx


def convolve_filter(x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
    """Gradient of the filter, summed block by block."""
    if _is_pointwise(window):
        return np.matmul(x.reshape(-1, w_shape[2]).T, dy.reshape(-1, w_shape[3])).reshape(w_shape)
    dw = np.zeros((prod(w_shape[:3]), w_shape[3]), x.dtype)
    product = np.empty_like(dw)
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        layer.im2col(x[part], columns, *window.position)
        np.matmul(rows.T, dy[part].reshape(len(rows), -1), out=product)
        dw += product
    return dw.reshape(w_shape)


def _is_pointwise(window: Window) -> bool:
    return window.position == (1, 1, 1, 1, 0, 0) and window.after == (0, 0)


def _blocks(
    x_shape: Shape, dtype: np.dtype[Any], window: Window
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield (images, columns, the same memory as a matrix); the memory is used again each time."""
    images, channels = x_shape[0], x_shape[3]
    row = prod(window.size) * channels
    each = max(prod(window.output) * row * dtype.itemsize, 1)
    step = max(min(_BLOCK_BYTES // each, images), 1)
    memory = np.empty((step, *window.output, row), dtype)
    for first in range(0, images, step):
        part = slice(first, min(first + step, images))
        columns = memory[: part.stop - first]
        yield part, columns, columns.reshape(-1, row)
