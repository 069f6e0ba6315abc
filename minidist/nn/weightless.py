"""Layers without variables that treat each element alike: Flatten, ReLU, GELU, Dropout."""

from __future__ import annotations

from math import prod
from typing import Any

from minidist import context, ops
from minidist.device.ops import Shape
from minidist.errors import UsageError
from minidist.nn.layer import STREAMS, Layer
from minidist.tensor import Tensor


class Flatten(Layer):
    """[n, ...] -> [n, k]."""

    kind = "flatten"

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        return (prod(shape),)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.reshape(x, (x.shape[0], prod(x.shape[1:])))


class ReLU(Layer):
    """max(x, 0)."""

    kind = "relu"

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.relu(x)


class GELU(Layer):
    """x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2."""

    kind = "gelu"

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.gelu(x)


class Dropout(Layer):
    """In training, set elements to 0 with probability `rate` and divide the others by 1 − rate."""

    kind = "dropout"

    def __init__(self, rate: float, *, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= rate < 1:
            raise UsageError(f"dropout: the rate is {rate}; it must be at least 0 and less than 1")
        self.rate = rate

    def _call(self, x: Tensor, training: bool) -> Tensor:
        if not training or self.rate == 0:
            return x
        return ops.dropout(x, self.rate, *context.draw(self.number * STREAMS))
