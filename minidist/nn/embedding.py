"""Embedding: a trainable row for each of a number of things."""

from __future__ import annotations

from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.initializers import Initializer, truncated_normal
from minidist.nn.layer import Layer
from minidist.tensor import Tensor


class Embedding(Layer):
    """table[ids]: integers [n, ...] from 0 to `rows` − 1 -> [n, ..., units].

    The gradient of the table is an IndexedSlices, so a step touches only the rows of its batch
    where the optimizer's rule allows that (SGD without weight decay).
    """

    kind = "embedding"

    def __init__(
        self,
        rows: int,
        units: int,
        *,
        initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.rows = rows
        self.units = units
        self.initializer = initializer or truncated_normal()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        self.table = self._variable("table", (self.rows, self.units), dtype, self.initializer)
        return (*shape, self.units)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.embedding(self.table, x)
