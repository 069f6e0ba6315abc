"""Layers that pool the elements of windows."""

from __future__ import annotations

from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.nn.layer import Layer, image
from minidist.ops.window import Padding, Pair, window
from minidist.tensor import Tensor


class MaxPool(Layer):
    """Greatest element of each window; strides default to the window's size."""

    kind = "max_pool"

    def __init__(
        self,
        size: Pair = 2,
        *,
        strides: Pair | None = None,
        padding: Padding = "VALID",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.size = size
        self.strides = size if strides is None else strides
        self.padding = padding

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        where = window(self.kind, image(shape), self.size, self.strides, self.padding)
        return (*where.output, shape[2])

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.max_pool(x, self.size, self.strides, self.padding)


class AveragePool(MaxPool):
    """Mean of each window; strides default to the window's size, padding does not count."""

    kind = "average_pool"

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.average_pool(x, self.size, self.strides, self.padding)


class GlobalAveragePool(Layer):
    """Mean of each channel: [n, h, w, c] -> [n, c]."""

    kind = "global_average_pool"

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        return image(shape)[2:]

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.reduce_mean(x, (1, 2))
