"""Sequential: layers one after another, each with a name and a number of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minidist import context
from minidist.device.ops import Shape
from minidist.errors import UsageError
from minidist.nn.layer import Layer
from minidist.nn.moving import together
from minidist.tensor import Tensor


class Sequential(Layer):
    """Layers one after another; may itself be a layer of another Sequential.

    Layers without a name get that of their kind: conv, conv_1, …. In another Sequential its name
    stands before its variables': "block_1/conv/kernel".
    """

    kind = "sequential"

    def __init__(self, layers: Sequence[Layer], name: str | None = None) -> None:
        super().__init__(name)
        self.layers = _listed(self.name, layers)
        self.nested = False
        given = [layer.name for layer in self.layers if layer.named]
        if len(set(given)) < len(given) or len(set(self.layers)) < len(self.layers):
            raise UsageError(
                f"a layer or a name stands twice in {self.name!r} (names given: {given}); make a "
                f"layer for each place and give each its own name, or none"
            )
        taken = set(given)
        for layer in self.layers:
            if not layer.named:
                layer.name = _unused(layer.kind, taken)
                taken.add(layer.name)
            if isinstance(layer, Sequential):
                layer.nested = True
        self.place(0)

    def place(self, number: int) -> int:
        for layer in self.layers:
            number = layer.place(number)
        return number

    def leaves(self) -> list[Layer]:
        return [leaf for layer in self.layers for leaf in layer.leaves()]

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if self.nested:
            with context.name_scope(self.name):
                return self._build_layers(shape, dtype)
        return self._build_layers(shape, dtype)

    def _build_layers(self, shape: Shape, dtype: Any) -> Shape:
        for layer in self.layers:
            shape = layer.build(shape, dtype)
            self.variables.extend(layer.variables)
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        with together():
            return self._pass(x, training)

    def _pass(self, x: Tensor, training: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, training)
        return x


def _listed(name: str, layers: Any) -> list[Layer]:
    """Return the layers of a list, at least one; raises UsageError where it is something else."""
    if isinstance(layers, Layer) or not isinstance(layers, Iterable):
        raise UsageError(
            f"{name}: the layers must be a list, as [Dense(4), ReLU()], not {layers!r} by itself"
        )
    listed = list(layers)
    if not listed:
        raise UsageError(f"{name}: the list of layers is empty; give at least one layer")
    for layer in listed:
        if not isinstance(layer, Layer):
            raise UsageError(f"{name}: {layer!r} is no layer")
    return listed


def _unused(kind: str, taken: set[str]) -> str:
    name, n = kind, 0
    while name in taken:
        n += 1
        name = f"{kind}_{n}"
    return name
