"""Convolution on a CPU: columns of a few images at a time, multiplied by BLAS.

im2col writes each window of the image as a row, [n·oh·ow, kh·kw·c]; then a convolution is one
matrix product with the filter seen as [kh·kw·c, k], and its gradients are two more. The rows of a
whole batch can be hundreds of megabytes, so the batch is walked in blocks whose columns stay in
the cache (columns.py); writing them again for the gradient is then cheaper than keeping them.

A 1×1 filter with stride 1 needs no columns: the image is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.device.columns import blocks
from minidist.device.ops import Shape, Window
from minidist.kernels import layer

_BLOCK_BYTES = 1 << 20  # of columns at a time: they stay in a core's second-level cache


def convolve(x: Array, w: Array, window: Window) -> Array:
    """[n, h, w, c] and [kh, kw, c, k] -> [n, oh, ow, k]."""
    y = np.empty((len(x), *window.output, w.shape[3]), x.dtype)
    if window.is_pointwise:
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
    if window.is_pointwise:
        np.matmul(dy.reshape(-1, dy.shape[3]), w[0, 0].T, out=dx.reshape(-1, x_shape[3]))
        return dx
    matrix = w.reshape(-1, w.shape[3]).T
    for part, columns, rows in _blocks(x_shape, dy.dtype, window):
        np.matmul(dy[part].reshape(len(rows), -1), matrix, out=rows)
        layer.col2im(columns, dx[part], *window.position)
    return dx


def convolve_filter(x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
    """Gradient of the filter, summed block by block."""
    if window.is_pointwise:
        return np.matmul(x.reshape(-1, w_shape[2]).T, dy.reshape(-1, w_shape[3])).reshape(w_shape)
    dw = np.zeros((prod(w_shape[:3]), w_shape[3]), x.dtype)
    product = np.empty_like(dw)
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        layer.im2col(x[part], columns, *window.position)
        np.matmul(rows.T, dy[part].reshape(len(rows), -1), out=product)
        dw += product
    return dw.reshape(w_shape)


def _blocks(
    x_shape: Shape, dtype: np.dtype[Any], window: Window
) -> Iterator[tuple[slice, Array, Array]]:
    return blocks(
        x_shape, window, dtype.itemsize, _BLOCK_BYTES, lambda shape: np.empty(shape, dtype)
    )
