"""Convolutions of every kind, with numbers of which every product and sum is exact in float32.

So all implementations, in whatever order they add up, must give the very same results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from minidist.device.ops import Window
from minidist.kernels import plain

MOST = 12  # rows and columns of an image


class Case(NamedTuple):
    """Arrays of a convolution, its window, and what its three directions must give."""

    x: np.ndarray[Any, Any]
    w: np.ndarray[Any, Any]
    dy: np.ndarray[Any, Any]
    window: Window

    @property
    def windows(self) -> plain.Windows:
        window = self.window
        return plain.Windows(window.output, window.size, window.strides, window.before)

    def y(self) -> np.ndarray[Any, Any]:
        seen = self.windows.take(self.x, 0)
        return np.einsum("pnijc,pck->nijk", seen, self.w.reshape(len(seen), *self.w.shape[2:]))

    def dx(self) -> np.ndarray[Any, Any]:
        matrix = self.w.reshape(-1, *self.w.shape[2:])
        parts = np.einsum("nijk,pck->pnijc", self.dy, matrix)
        return self.windows.add_back(parts, self.x.shape)

    def dw(self) -> np.ndarray[Any, Any]:
        return plain.filter_gradient(self.x, self.dy, self.windows)


def case(
    images: int, size: tuple[int, int], channels: int, filters: int, window: Window, seed: int = 0
) -> Case:
    """Return a case with small whole numbers."""
    whole = np.random.default_rng(seed)
    shapes = (
        (images, *size, channels),
        (*window.size, channels, filters),
        (images, *window.output, filters),
    )
    return Case(*(whole.integers(-4, 5, shape).astype(np.float32) for shape in shapes), window)


@st.composite
def cases(draw: st.DrawFn, filters: st.SearchStrategy[int]) -> Case:
    axes = []
    for _ in range(2):
        length, kernel = draw(st.integers(1, MOST)), draw(st.integers(1, 4))
        before, after = draw(st.integers(0, kernel - 1)), draw(st.integers(0, kernel - 1))
        stride = draw(st.integers(1, 3))
        covered = max(length + before + after, kernel)
        output = (covered - kernel) // stride + 1
        # What a window reaches beyond the image's end, as the operations say it.
        after = max((output - 1) * stride + kernel - length - before, 0)
        axes.append((length, kernel, stride, before, after, output))
    lengths, kernels, strides, befores, afters, outputs = zip(*axes, strict=True)
    window = Window(kernels, strides, befores, afters, outputs)
    return case(draw(st.integers(0, 3)), lengths, draw(st.integers(1, 9)), draw(filters), window)
