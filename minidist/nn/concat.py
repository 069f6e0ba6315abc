"""Concat: layers side by side, whose results are joined along the channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist import context, ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError, UsageError
from minidist.nn.layer import Layer
from minidist.nn.moving import together
from minidist.nn.sequential import Sequential
from minidist.tensor import Tensor


class Concat(Layer):
    """What branches make of the same examples, one behind the other along the last axis.

    A branch is a list of layers one after another; an empty one hands on what it is given. Its
    variables are named by its place: "concat/branch_1/conv/kernel".
    """

    kind = "concat"

    def __init__(self, branches: Sequence[Sequence[Layer]], *, name: str | None = None) -> None:
        super().__init__(name)
        if not isinstance(branches, Sequence) or not branches:
            raise UsageError(
                f"{self.name}: the branches must be a list of lists of layers, as "
                f"[[Conv2D(4, 1)], [MaxPool()]], not {branches!r}"
            )
        self.branches = [self._branch(*each) for each in enumerate(branches)]
        leaves = self.leaves()
        if len(set(leaves)) < len(leaves):
            raise UsageError(
                f"{self.name}: a layer stands in two places of its branches; make a layer for each "
                f"place"
            )

    def _branch(self, place: int, layers: Sequence[Layer]) -> Sequential | None:
        """Return a branch as one layer, None for the branch without any."""
        if isinstance(layers, Sequence) and not layers:
            return None
        branch = Sequential(layers, f"branch_{place}")
        branch.nested = True
        return branch

    def place(self, number: int) -> int:
        for branch in filter(None, self.branches):
            number = branch.place(number)
        return number

    def leaves(self) -> list[Layer]:
        """Return the layers of all branches, and itself: what it joins is another array."""
        return [*(leaf for branch in filter(None, self.branches) for leaf in branch.leaves()), self]

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        shapes = []
        with context.name_scope(self.name):
            for branch in self.branches:
                shapes.append(shape if branch is None else branch.build(shape, dtype))
                self.variables.extend([] if branch is None else branch.variables)
        if len({each[:-1] for each in shapes}) > 1 or not all(shapes):
            raise ShapeError(
                f"{self.name}: what the branches make of examples {shape} has shapes "
                f"{', '.join(map(str, shapes))}; only what differs in nothing but its last length "
                f"can be joined"
            )
        return (*shapes[0][:-1], sum(each[-1] for each in shapes))

    def _call(self, x: Tensor, training: bool) -> Tensor:
        with together():
            parts = [x if branch is None else branch(x, training) for branch in self.branches]
        return ops.concat(parts)
