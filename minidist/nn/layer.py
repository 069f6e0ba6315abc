"""Layer: what all kinds of layers have in common."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist import context, ops, random
from minidist.creation import create
from minidist.device.ops import Shape
from minidist.dtypes import as_dtype, is_narrow
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.initializers import Initializer
from minidist.nn.out_of_memory import out_of_memory
from minidist.tensor import Tensor
from minidist.variable import Variable

# Of each layer: its variables draw their initial values from streams of their own.
STREAMS = 4


class Layer(ABC):
    """One step of a model. `_build` and `_call` are what a kind of layer fills in.

    `name` is unique in the model; `number`, counted through the whole model, is what random draws
    are keyed by. `variables` are in order of creation, named "<layer>/<variable>".
    """

    kind = "layer"
    relu = False  # whether it takes the ReLU of its result

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.kind
        self.named = name is not None
        self.number = 0
        self.variables: list[Variable] = []
        self.input_shape: Shape | None = None
        self.output_shape: Shape | None = None

    @property
    def trainable_variables(self) -> list[Variable]:
        return [variable for variable in self.variables if variable.trainable]

    def build(self, input_shape: Sequence[int], dtype: Any = None) -> Shape:
        """Make the variables for examples of a shape (without the batch); return the output's.

        dtype: the default one unless given (see md.default_dtype).

        Raises ShapeError naming the layer if it cannot take such examples.
        """
        if self.input_shape is not None:
            raise ContextError(f"layer {self.name!r} is built already, for {self.input_shape}")
        shape = _lengths(self.name, input_shape)
        try:
            self.output_shape = self._build(
                shape, context.frame().dtype if dtype is None else as_dtype(dtype)
            )
        except ShapeError as error:
            raise ShapeError(
                f"layer {self.name!r}, for examples of shape {shape}: {error}"
            ) from None
        self.input_shape = shape
        return self.output_shape

    def __call__(self, x: ops.TensorLike, training: bool = False) -> Tensor:
        """Compute on a batch [n, *input_shape] -> [n, *output_shape].

        On float16 and bfloat16 it computes in that dtype, casting its variables where it uses them.
        Raises OutOfMemoryError where there is no memory; it says which batch would fit.
        """
        x = ops.as_tensor(x)
        if self.input_shape is None:
            raise ContextError(
                f"layer {self.name!r} is not built; call build({x.shape[1:]}) of the model first, "
                f"in the scope of the strategy"
            )
        if x.shape[1:] != self.input_shape or not x.shape:
            raise ShapeError(
                f"layer {self.name!r} is built for examples of shape {self.input_shape} and cannot "
                f"take a batch of shape {x.shape}"
            )
        try:
            return self._call(x, training)
        except MemoryError as error:
            raise out_of_memory(error, self, x, training) from (error.__cause__ or error)

    def leaves(self) -> list[Layer]:
        """Return the layers that this one calls, in order, and those that they call; or itself."""
        return [self]

    def place(self, number: int) -> int:
        """Take a number in the model; return the next one that is free.

        A layer that takes the ReLU itself leaves the number that a layer for it would have: so a
        model draws the same random numbers either way.
        """
        self.number = number
        return number + (2 if self.relu else 1)

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        return shape

    @abstractmethod
    def _call(self, x: Tensor, training: bool) -> Tensor:
        """Compute on a batch of the shape that the layer is built for."""

    def _cast_to(self, x: Tensor, variable: Variable) -> ops.TensorLike:
        """Return a variable for use with `x`: in its dtype where that is float16 or bfloat16.

        The variable keeps its own dtype, and so does its gradient.
        """
        return ops.cast(variable, x.dtype) if is_narrow(x.dtype) else variable

    def _variable(
        self,
        name: str,
        shape: Shape,
        dtype: Any,
        initializer: Initializer,
        trainable: bool = True,
        decays: bool = True,
    ) -> Variable:
        draw = self.number * STREAMS + len(self.variables)
        variable: Variable = create(
            # Called for each copy that starts on its own, on the replica whose copy it is.
            lambda: initializer(shape, dtype, random.stream(draw)),
            name=f"{self.name}/{name}",
            dtype=dtype,
            trainable=trainable,
            decays=decays,
        )
        self.variables.append(variable)
        return variable


def takes_relu(layer: str, activation: str | None, kinds: Sequence[str] = ("relu",)) -> bool:
    """Return whether a layer's `activation` is one of its kinds of ReLU rather than None.

    Raises UsageError for another one.
    """
    if activation is not None and activation not in kinds:
        known = ", ".join(map(repr, kinds))
        raise UsageError(
            f"{layer}: activation={activation!r} is not known; it may be {known} or None"
        )
    return activation is not None


def count(layer: str, what: str, value: Any) -> int:
    """Return a number of units or filters: a whole number above 0, or a UsageError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise UsageError(f"{layer}: {what} must be a whole number above 0, not {value!r}")
    return int(value)


def _lengths(layer: str, shape: Any) -> Shape:
    """Return the shape of an example, which must be known before a batch is seen."""
    try:
        lengths = tuple(operator.index(length) for length in shape)
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise ShapeError(
            f"layer {layer!r}: build takes the shape of one example, whole numbers without the "
            f"batch, as (28, 28, 1), not {shape!r}"
        )
    return lengths


def image(shape: Shape) -> Shape:
    """Return the shape of an example if it is [height, width, channels], else raise ShapeError."""
    if len(shape) != 3:
        raise ShapeError("examples must be images [height, width, channels]")
    return shape
