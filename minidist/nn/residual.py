"""Residual: layers whose result is added to what they were given (He et al., 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError
from minidist.nn.layer import Layer, takes_relu
from minidist.nn.normalization import BatchNorm
from minidist.nn.sequential import Sequential
from minidist.tensor import Tensor


class Residual(Sequential):
    """body(x) + shortcut(x), or its ReLU; without layers for the shortcut, that is x itself.

    Both are layers one after another. Where a BatchNorm ends the body, the sum and the ReLU are
    its own pass. Variables are named as in a Sequential: "residual/conv/kernel" in the body,
    "residual/shortcut/conv/kernel" in the shortcut.
    """

    kind = "residual"

    def __init__(
        self,
        body: Sequence[Layer],
        shortcut: Sequence[Layer] | None = None,
        *,
        activation: str | None = "relu",
        name: str | None = None,
    ) -> None:
        self.shortcut = None if shortcut is None else Sequential(shortcut, "shortcut")
        if self.shortcut is not None:
            self.shortcut.nested = True
        self.relu = takes_relu(self.kind, activation)
        super().__init__(body, name)

    def place(self, number: int) -> int:
        number = super().place(number)
        return number if self.shortcut is None else self.shortcut.place(number)

    def leaves(self) -> list[Layer]:
        return [*([] if self.shortcut is None else self.shortcut.leaves()), *super().leaves()]

    def _build_layers(self, shape: Shape, dtype: Any) -> Shape:
        result = super()._build_layers(shape, dtype)
        beside = shape
        if self.shortcut is not None:
            beside = self.shortcut.build(shape, dtype)
            self.variables.extend(self.shortcut.variables)
        if result != beside:
            raise ShapeError(
                f"{self.name}: what the body makes of examples {shape} has shape {result}, and "
                f"beside it is {beside}; only equal shapes can be added. Give the shortcut layers "
                f"that fit"
            )
        return result

    def _pass(self, x: Tensor, training: bool) -> Tensor:
        beside = x if self.shortcut is None else self.shortcut(x, training)
        last = self.layers[-1]
        if isinstance(last, BatchNorm) and not last.relu:
            for layer in self.layers[:-1]:
                x = layer(x, training)
            return last.normalize(x, training, beside, self.relu)
        y = ops.add(super()._pass(x, training), beside)
        return ops.relu(y) if self.relu else y
