"""Convolution on a GPU: columns of some images at a time, multiplied by cuBLAS.

It is cpu_convolution.py's way, with larger blocks: they fill the GPU and bound the memory. What is
narrow is added up in float32, over the images and over the filter, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import cupy
import numpy as np

from minidist.device.base import Array
from minidist.device.columns import blocks
from minidist.device.cuda_blas import multiply
from minidist.device.cuda_machine import CudaMachine
from minidist.device.ops import Shape, Window
from minidist.kernels import gpu_window
from minidist.kernels.grid import wide

_BLOCK_BYTES = 256 << 20  # of columns at a time


def convolve(machine: CudaMachine, x: Array, w: Array, window: Window) -> Array:
    """[n, h, w, c] and [kh, kw, c, k] -> [n, oh, ow, k]."""
    y = cupy.ndarray((len(x), *window.output, w.shape[3]), x.dtype)
    matrix = w.reshape(-1, w.shape[3])
    if window.is_pointwise:
        multiply(machine.blas, x.reshape(-1, matrix.shape[0]), matrix, y.reshape(-1, y.shape[3]))
        return y
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        gpu_window.im2col(machine, x[part], columns, window.position)
        multiply(machine.blas, rows, matrix, y[part].reshape(len(rows), y.shape[3]))
    return y


def convolve_input(
    machine: CudaMachine, dy: Array, w: Array, x_shape: Shape, window: Window
) -> Array:
    """Gradient of the image: each column adds to the window that it came from."""
    dx = cupy.ndarray(x_shape, dy.dtype)
    matrix = w.reshape(-1, w.shape[3])
    if window.is_pointwise:
        flat = dx.reshape(-1, matrix.shape[0])
        multiply(machine.blas, dy.reshape(-1, w.shape[3]), matrix, flat, transpose_b=True)
        return dx
    for part, columns, rows in _blocks(x_shape, wide(dy.dtype.name), window):
        multiply(
            machine.blas, dy[part].reshape(len(rows), w.shape[3]), matrix, rows, transpose_b=True
        )
        gpu_window.col2im(machine, columns, dx[part], window.position)
    return dx


def convolve_filter(
    machine: CudaMachine, x: Array, dy: Array, w_shape: Shape, window: Window
) -> Array:
    """Gradient of the filter, in the type that is computed with, added up block by block."""
    dw = cupy.ndarray((prod(w_shape[:3]), w_shape[3]), wide(x.dtype.name))
    dw.fill(0)
    if window.is_pointwise:
        pixels = x.reshape(-1, w_shape[2])
        multiply(machine.blas, pixels, dy.reshape(-1, w_shape[3]), dw, transpose_a=True)
        return dw.reshape(w_shape)
    for part, columns, rows in _blocks(x.shape, x.dtype, window):
        gpu_window.im2col(machine, x[part], columns, window.position)
        flat = dy[part].reshape(len(rows), w_shape[3])
        multiply(machine.blas, rows, flat, dw, transpose_a=True, add=True)
    return dw.reshape(w_shape)


def _blocks(
    x_shape: Shape, dtype: np.dtype[Any], window: Window
) -> Iterator[tuple[slice, Array, Array]]:
    return blocks(
        x_shape, window, dtype.itemsize, _BLOCK_BYTES, lambda shape: cupy.ndarray(shape, dtype)
    )
