"""Layers: what a model is a list of.

A layer is built once for the shape of one example, which makes its variables; then it is called
with batches. Layers hold no values themselves: those are in the variables, and each replica reads
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from minidist import context, ops, random
from minidist.device.ops import Shape
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.initializers import (
    Initializer,
    glorot_uniform,
    he_normal,
    ones,
    truncated_normal,
    zeros,
)
from minidist.ops.window import Padding, Pair, window
from minidist.tensor import Tensor
from minidist.variable import Variable, assign_moving_averages, create

__all__ = [
    "AveragePool",
    "BatchNorm",
    "Conv2D",
    "Dense",
    "Dropout",
    "Flatten",
    "GlobalAveragePool",
    "Initializer",
    "Layer",
    "MaxPool",
    "ReLU",
    "Sequential",
    "glorot_uniform",
    "he_normal",
    "ones",
    "truncated_normal",
    "zeros",
]

# Of each layer: its variables draw their initial values from streams of their own.
_STREAMS = 4


class Layer:
    """One step of a model. `_build` and `_call` are what a kind of layer fills in.

    `name` is unique in the model; `number`, counted through the whole model, is what random draws
    are keyed by. `variables` are in order of creation, named "<layer>/<variable>".
    """

    kind = "layer"

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

    def build(self, input_shape: Sequence[int], dtype: Any = "float32") -> Shape:
        """Make the variables for examples of a shape (without the batch); return the output's.

        Raises ShapeError naming the layer if it cannot take such examples.
        """
        if self.input_shape is not None:
            raise ContextError(f"layer {self.name!r} is built already, for {self.input_shape}")
        shape = tuple(int(length) for length in input_shape)
        try:
            self.output_shape = self._build(shape, dtype)
        except ShapeError as error:
            raise ShapeError(
                f"layer {self.name!r}, for examples of shape {shape}: {error}"
            ) from None
        self.input_shape = shape
        return self.output_shape

    def __call__(self, x: ops.TensorLike, training: bool = False) -> Tensor:
        """Compute on a batch [n, *input_shape] -> [n, *output_shape]."""
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
        return self._call(x, training)

    def place(self, number: int) -> int:
        """Take a number in the model; return the next one that is free."""
        self.number = number
        return number + 1

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        raise NotImplementedError

    def _variable(
        self, name: str, shape: Shape, dtype: Any, initializer: Initializer, trainable: bool = True
    ) -> Variable:
        draw = self.number * _STREAMS + len(self.variables)
        variable = create(
            # Called for each copy that starts on its own, on the replica whose copy it is.
            lambda: initializer(shape, dtype, random.stream(draw)),
            name=f"{self.name}/{name}", dtype=dtype, trainable=trainable,
        )
        self.variables.append(variable)
        return variable


class Dense(Layer):
    """x @ kernel + bias: [n, k] -> [n, units]."""

    kind = "dense"

    def __init__(
        self, units: int, *, use_bias: bool = True, kernel_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None, name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.units = units
        self.use_bias = use_bias
        self.kernel_initializer = kernel_initializer or glorot_uniform()
        self.bias_initializer = bias_initializer or zeros()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if len(shape) != 1:
            raise ShapeError("dense: examples must be of rank 1; put a Flatten before")
        self.kernel = self._variable(
            "kernel", (shape[0], self.units), dtype, self.kernel_initializer
        )
        if self.use_bias:
            self.bias = self._variable("bias", (self.units,), dtype, self.bias_initializer)
        return (self.units,)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        if self.use_bias:
            return ops.dense(x, self.kernel, self.bias)
        return ops.matmul(x, self.kernel)


class Conv2D(Layer):
    """conv2d(x, kernel) + bias: [n, h, w, c] -> [n, oh, ow, filters]."""

    kind = "conv"

    def __init__(
        self, filters: int, size: Pair, *, strides: Pair = 1, padding: Padding = "SAME",
        use_bias: bool = True, kernel_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None, name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.filters = filters
        self.size = size
        self.strides = strides
        self.padding = padding
        self.use_bias = use_bias
        self.kernel_initializer = kernel_initializer or glorot_uniform()
        self.bias_initializer = bias_initializer or zeros()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        where = window("conv2d", _image(shape), self.size, self.strides, self.padding)
        self.kernel = self._variable(
            "kernel", (*where.size, shape[2], self.filters), dtype, self.kernel_initializer
        )
        if self.use_bias:
            self.bias = self._variable("bias", (self.filters,), dtype, self.bias_initializer)
        return (*where.output, self.filters)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        y = ops.conv2d(x, self.kernel, self.strides, self.padding)
        return ops.bias_add(y, self.bias) if self.use_bias else y


class MaxPool(Layer):
    """Greatest element of each window; strides default to the window's size."""

    kind = "max_pool"

    def __init__(
        self, size: Pair = 2, *, strides: Pair | None = None, padding: Padding = "VALID",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.size = size
        self.strides = size if strides is None else strides
        self.padding = padding

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        where = window(self.kind, _image(shape), self.size, self.strides, self.padding)
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
        return _image(shape)[2:]

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.reduce_mean(x, (1, 2))


class BatchNorm(Layer):
    """Normalise each channel (the last axis): by the batch in training, else by moving averages.

    The averages follow v = momentum·v + (1 − momentum)·(the batch's), variance biased, as the mean
    over replicas weighted by their counts; so training needs all replicas to call the layer.
    """

    kind = "batch_norm"

    def __init__(
        self, *, momentum: float = 0.9, epsilon: float = 1e-5, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.momentum = momentum
        self.epsilon = epsilon

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if not shape:
            raise ShapeError("batch_norm: examples need a last axis to normalise along")
        size = shape[-1:]
        self.gamma = self._variable("gamma", size, dtype, ones())
        self.beta = self._variable("beta", size, dtype, zeros())
        self.moving_mean = self._variable("moving_mean", size, dtype, zeros(), trainable=False)
        self.moving_variance = self._variable(
            "moving_variance", size, dtype, ones(), trainable=False
        )
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        if not training:
            return ops.batch_norm_inference(
                x, self.gamma, self.beta, self.moving_mean, self.moving_variance, self.epsilon
            )
        y, mean, variance = ops.batch_norm(x, self.gamma, self.beta, self.epsilon)
        assign_moving_averages(
            [self.moving_mean, self.moving_variance], [mean, variance], self.momentum, x.shape[0]
        )
        return y


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
        return ops.dropout(x, self.rate, *context.draw(self.number * _STREAMS))


class Sequential(Layer):
    """Layers one after another; may itself be a layer of another Sequential.

    Layers without a name get that of their kind: conv, conv_1, …. In another Sequential its name
    stands before its variables': "block_1/conv/kernel".
    """

    kind = "sequential"

    def __init__(self, layers: Sequence[Layer], name: str | None = None) -> None:
        super().__init__(name)
        self.layers = list(layers)
        self.nested = False
        taken: set[str] = set()
        given = {layer.name for layer in self.layers if layer.named}
        for layer in self.layers:
            if not layer.named:
                layer.name = _unused(layer.kind, taken | given)
            if layer.name in taken:
                raise UsageError(
                    f"two layers of {self.name!r} are called {layer.name!r}, or one stands there "
                    f"twice; give each its own name"
                )
            taken.add(layer.name)
            if isinstance(layer, Sequential):
                layer.nested = True
        self.place(0)

    def place(self, number: int) -> int:
        for layer in self.layers:
            number = layer.place(number)
        return number

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
        for layer in self.layers:
            x = layer(x, training)
        return x


def _image(shape: Shape) -> Shape:
    if len(shape) != 3:
        raise ShapeError("examples must be images [height, width, channels]")
    return shape


def _unused(kind: str, taken: set[str]) -> str:
    name, n = kind, 0
    while name in taken:
        n += 1
        name = f"{kind}_{n}"
    return name
