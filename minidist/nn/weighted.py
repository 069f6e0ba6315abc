"""Layers that multiply by a kernel and add a bias."""

from __future__ import annotations

from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError
from minidist.initializers import Initializer, glorot_uniform, he_normal, zeros
from minidist.nn.layer import Layer, count, image, takes_relu
from minidist.ops.window import Padding, Pair, window
from minidist.tensor import Tensor


class Dense(Layer):
    """x @ kernel + bias, or with activation="relu" its ReLU: [n, k] -> [n, units].

    Of sequences each token alike: [n, tokens, k] -> [n, tokens, units].
    """

    kind = "dense"

    def __init__(
        self,
        units: int,
        *,
        activation: str | None = None,
        use_bias: bool = True,
        kernel_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.units = count(self.kind, "units", units)
        self.relu = takes_relu(self.kind, activation)
        self.use_bias = use_bias
        self.kernel_initializer = kernel_initializer or glorot_uniform()
        self.bias_initializer = bias_initializer or zeros()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if len(shape) not in (1, 2):
            raise ShapeError("dense: examples must be [k] or [tokens, k]; put a Flatten before")
        self.kernel = self._variable(
            "kernel", (shape[-1], self.units), dtype, self.kernel_initializer
        )
        if self.use_bias:
            self.bias = self._variable("bias", (self.units,), dtype, self.bias_initializer)
        return (*shape[:-1], self.units)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        if x.ndim == 2:
            return self._rows(x)
        n, tokens, k = x.shape
        y = self._rows(ops.reshape(x, (n * tokens, k)))
        return ops.reshape(y, (n, tokens, self.units))

    def _rows(self, x: Tensor) -> Tensor:
        kernel = self._cast_to(x, self.kernel)
        if self.use_bias:
            return ops.dense(x, kernel, self._cast_to(x, self.bias), self.relu)
        y = ops.matmul(x, kernel)
        return ops.relu(y) if self.relu else y


class Conv2D(Layer):
    """conv2d(x, kernel) + bias, or its ReLU: [n, h, w, c] -> [n, oh, ow, filters]."""

    kind = "conv"

    def __init__(
        self,
        filters: int,
        size: Pair,
        *,
        strides: Pair = 1,
        padding: Padding = "SAME",
        activation: str | None = None,
        use_bias: bool = True,
        kernel_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.filters = count(self.kind, "filters", filters)
        self.size = size
        self.strides = strides
        self.padding = padding
        self.relu = takes_relu(self.kind, activation)
        self.use_bias = use_bias
        self.kernel_initializer = kernel_initializer or glorot_uniform()
        self.bias_initializer = bias_initializer or zeros()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        where = window("conv2d", image(shape), self.size, self.strides, self.padding)
        self.kernel = self._variable(
            "kernel", (*where.size, shape[2], self.filters), dtype, self.kernel_initializer
        )
        if self.use_bias:
            self.bias = self._variable("bias", (self.filters,), dtype, self.bias_initializer)
        return (*where.output, self.filters)

    def _call(self, x: Tensor, training: bool) -> Tensor:
        bias = self._cast_to(x, self.bias) if self.use_bias else None
        kernel = self._cast_to(x, self.kernel)
        return ops.conv2d(x, kernel, self.strides, self.padding, bias, self.relu)


class DepthwiseConv2D(Layer):
    """depthwise_conv2d(x, kernel): [n, h, w, c] -> [n, oh, ow, c]; each channel has a filter.

    The kernel is [*size, c], so its fan in is that of one filter.
    """

    kind = "depthwise_conv"

    def __init__(
        self,
        size: Pair,
        *,
        strides: Pair = 1,
        padding: Padding = "SAME",
        kernel_initializer: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.size = size
        self.strides = strides
        self.padding = padding
        self.kernel_initializer = kernel_initializer or he_normal()

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        where = window("depthwise_conv2d", image(shape), self.size, self.strides, self.padding)
        self.kernel = self._variable(
            "kernel", (*where.size, shape[2]), dtype, self.kernel_initializer
        )
        return (*where.output, shape[2])

    def _call(self, x: Tensor, training: bool) -> Tensor:
        kernel = self._cast_to(x, self.kernel)
        return ops.depthwise_conv2d(x, kernel, self.strides, self.padding)
