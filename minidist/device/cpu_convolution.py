"""Convolution on a CPU: columns of a few images at a time, multiplied by BLAS.

im2col writes each window of the image as a row, [n·oh·ow, kh·kw·c]; then a convolution is one
matrix product with the filter seen as [kh·kw·c, k], and its gradients are two more. The rows of a
whole batch can be hundreds of megabytes, so the batch is walked in blocks whose columns stay in
the cache (columns.py); writing them again for the gradient is then cheaper than keeping them.

A 1×1 filter with stride 1 needs no columns: the image is its own. The last argument is the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.device.columns import blocks
from minidist.device.ops import Shape, Window
from minidist.kernels import layer

_BLOCK_BYTES = 1 << 20  # of columns at a time: they stay in a core's second-level cache


def convolve(window: Window, x: Array, w: Array, y: Array) -> None:
    """[n, h, w, c] and [kh, kw, c, k] -> [n, oh, ow, k]."""
    if window.is_pointwise:
        np.matmul(x.reshape(-1, x.shape[3]), w[0, 0], out=y.reshape(-1, y.shape[3]))
        return
    matrix = w.reshape(-1, w.shape[3])
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        layer.im2col(x[part], columns, *window.position)
        np.matmul(rows, matrix, out=y[part].reshape(len(rows), -1))


def convolve_input(window: Window, dy: Array, w: Array, dx: Array) -> None:
    """Gradient of the image: each column adds to the window that it came from."""
    if window.is_pointwise:
        np.matmul(dy.reshape(-1, dy.shape[3]), w[0, 0].T, out=dx.reshape(-1, dx.shape[3]))
        return
    matrix = w.reshape(-1, w.shape[3]).T
    for part, columns, rows in _blocks(dx.shape, dy.dtype, window):
        np.matmul(dy[part].reshape(len(rows), -1), matrix, out=rows)
        layer.col2im(columns, dx[part], *window.position)


def convolve_filter(window: Window, x: Array, dy: Array, dw: Array) -> None:
    """Gradient of the filter, summed block by block."""
    matrix = dw.reshape(-1, dw.shape[3])
    if window.is_pointwise:
        np.matmul(x.reshape(-1, x.shape[3]).T, dy.reshape(-1, dy.shape[3]), out=matrix)
        return
    matrix.fill(0)
    product = np.empty_like(matrix)
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        layer.im2col(x[part], columns, *window.position)
        np.matmul(rows.T, dy[part].reshape(len(rows), -1), out=product)
        matrix += product


def _blocks(
    x_shape: Shape, dtype: np.dtype[Any], window: Window
) -> Iterator[tuple[slice, Array, Array]]:
    return blocks(
        x_shape, window, dtype.itemsize, _BLOCK_BYTES, lambda shape: np.empty(shape, dtype)
    )
