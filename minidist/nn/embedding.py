"""Embedding and Positions: a trainable row for each of a number of things, or for each place."""

from __future__ import annotations

from typing import Any

from minidist import context, ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError
from minidist.initializers import Initializer, truncated_normal
from minidist.nn.layer import Layer, count
from minidist.tensor import Tensor


class Embedding(Layer):
    """table[ids]: integers [n, ...] from 0 to `rows` − 1 -> [n, ..., units].

    The gradient of the table is an IndexedSlices, so a step touches only the rows of its batch
    where the optimizer's rule allows that (SGD without weight decay); sparse=False makes it whole,
    which is less to do where a batch uses most rows anyway. Integers have no say in the
    dtype to go on in: that is the context's for activations (see train.py), or else the table's.
    """

    kind = "embedding"

    def __init__(
        self,
        rows: int,
        units: int,
        *,
        sparse: bool = True,
        initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.rows = count(self.kind, "rows", rows)
        self.units = count(self.kind, "units", units)
        self.sparse = sparse
        self.initializer = initializer or truncated_normal()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        self.table = self._variable("table", (self.rows, self.units), dtype, self.initializer)
        return (*shape, self.units)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        rows = ops.embedding(self.table, x, self.sparse)
        dtype = context.frame().activations
        return rows if dtype is None else ops.cast(rows, dtype)


class Positions(Layer):
    """x + table: [n, tokens, units] -> the same, with a row of the table for each place."""

    kind = "positions"

    def __init__(self, *, initializer: Initializer | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.initializer = initializer or truncated_normal()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if len(shape) != 2:
            raise ShapeError("positions: examples must be [tokens, units]")
        self.table = self._variable("table", shape, dtype, self.initializer)
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.add(x, self._cast_to(x, self.table))
