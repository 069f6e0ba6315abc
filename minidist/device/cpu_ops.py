"""CpuOps: the arithmetic on CPU devices, by NumPy, its BLAS and `minidist.kernels`.

Everything here runs on the thread that asks and releases the GIL in what takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, Unpack

import numpy as np

from minidist.device import cpu_linear
from minidist.device.base import Array
from minidist.device.cpu_foreign import brought
from minidist.device.cpu_narrow import compute, in_float32, rounded, rounding, widened
from minidist.device.ops import (
    AdamUpdate,
    Axis,
    MomentumUpdate,
    Ops,
    RMSPropUpdate,
    Shape,
    Tensors,
    Update,
    Window,
    Words,
)
from minidist.dtypes import as_array, as_dtype, is_narrow
from minidist.kernels import attention, channel, depthwise, layer, reduce, tokens, update
from minidist.threads import per_replica

_RELATIONS = {"equal": np.equal, "less": np.less, "less_equal": np.less_equal}


class CpuOps(Ops):
    """NumPy arrays, C-contiguous. NumPy gives numbers for rank 0, so results pass `asarray`.

    Verbs that only move elements take any dtype; see `cpu_narrow.py` for those that compute.
    """

    can_update_copies: ClassVar[bool] = True

    # -- arrays ------------------------------------------------------------------------------

    def host_view(self, a: Array) -> np.ndarray[Any, Any]:
        view: np.ndarray[Any, Any] = a.view()
        view.flags.writeable = False
        return view

    def full(self, shape: Shape, value: float, dtype: Any) -> Array:
        dtype = as_dtype(dtype)
        array = np.empty(shape, dtype)  # a third of the time of np.full, where it is small
        array[...] = as_array(value, dtype) if is_narrow(dtype) else value
        return array

    def fill(self, a: Array, value: float) -> None:
        a.fill(value)

    def copy(self, a: Array) -> Array:
        return np.array(a, order="C")

    def share_memory(self, a: Array, b: Array) -> bool:
        if a is b or (a.flags.owndata and b.flags.owndata):  # most arrays; NumPy asks for longer
            return a is b
        return np.may_share_memory(a, b)

    def cast(self, a: Array, dtype: Any) -> Array:
        dtype = as_dtype(dtype)
        if a.dtype == dtype:
            return np.array(a, order="C")
        if is_narrow(dtype):
            return rounded(a, dtype)
        return widened(a).astype(dtype, order="C", copy=False)

    def convert(self, destinations: Tensors, sources: Tensors, *, threads: int) -> None:
        pairs: dict[Any, tuple[list[Array], list[Array]]] = {}
        for into, array in zip(destinations, sources, strict=True):
            columns = pairs.setdefault((into.dtype, array.dtype), ([], []))
            columns[0].append(into)
            columns[1].append(array)
        for (to, dtype), (wanted, given) in pairs.items():
            narrow, wide = sorted((to, dtype), key=lambda one: one.itemsize)
            if is_narrow(narrow) and wide == np.float32:
                reduce.cast(wanted, given, threads=threads)
                continue
            for into, array in zip(wanted, given, strict=True):
                np.copyto(into, self.cast(array, to))

    def at_once(self, function: Callable[..., Any], *arrays: Array) -> Any:
        return compute(function, *arrays)

    # -- elementwise ---------------------------------------------------------------------------

    @in_float32
    def add(self, a: Array, b: Array) -> Array:
        return np.asarray(np.add(a, b))

    @in_float32
    def subtract(self, a: Array, b: Array) -> Array:
        return np.asarray(np.subtract(a, b))

    @in_float32
    def multiply(self, a: Array, b: Array) -> Array:
        return np.asarray(np.multiply(a, b))

    @in_float32
    def divide(self, a: Array, b: Array) -> Array:
        return np.asarray(np.divide(a, b))

    @in_float32
    def power(self, a: Array, exponent: float) -> Array:
        return np.asarray(np.power(a, exponent))

    @in_float32
    def negative(self, a: Array) -> Array:
        return np.asarray(np.negative(a))

    @in_float32
    def exp(self, a: Array) -> Array:
        return np.asarray(np.exp(a))

    @in_float32
    def log(self, a: Array) -> Array:
        return np.asarray(np.log(a))

    @in_float32
    def sqrt(self, a: Array) -> Array:
        return np.asarray(np.sqrt(a))

    def compare(self, relation: str, a: Array, b: Array) -> Array:
        return np.asarray(_RELATIONS[relation](a, b))

    def accumulate(self, a: Array, b: Array) -> None:
        if is_narrow(a.dtype):
            a[...] = self.add(a, b)
        else:
            np.add(a, b, out=a)

    @in_float32
    def relu(self, x: Array) -> Array:
        y = np.empty_like(x)
        layer.relu(x, y, threads=per_replica())
        return y

    @in_float32
    def relu_backward(self, dy: Array, y: Array) -> Array:
        dx = np.empty_like(y)
        layer.relu_backward(dy, y, dx, threads=per_replica())
        return dx

    @in_float32
    def relu6(self, x: Array) -> Array:
        y = np.empty_like(x)
        layer.relu6(x, y, threads=per_replica())
        return y

    @in_float32
    def relu6_backward(self, dy: Array, y: Array) -> Array:
        dx = np.empty_like(y)
        layer.relu6_backward(dy, y, dx, threads=per_replica())
        return dx

    @in_float32
    def gelu(self, x: Array) -> Array:
        y = np.empty_like(x)
        tokens.gelu(x, y, threads=per_replica())
        return y

    @in_float32
    def gelu_backward(self, dy: Array, x: Array) -> Array:
        dx = np.empty_like(x)
        tokens.gelu_backward(dy, x, dx, threads=per_replica())
        return dx

    @in_float32
    def dropout(self, x: Array, rate: float, key: Words, counter: Words) -> Array:
        y = np.empty_like(x)
        layer.dropout(x, y, rate, key, counter, threads=per_replica())
        return y

    # -- shapes --------------------------------------------------------------------------------

    def reshape(self, a: Array, shape: Shape) -> Array:
        return a.reshape(shape)

    def transpose(self, a: Array, axes: Axis) -> Array:
        return np.array(a.transpose(axes), order="C")

    def broadcast_to(self, a: Array, shape: Shape) -> Array:
        array = np.empty(shape, a.dtype)
        array[...] = a
        return array

    def concatenate(self, arrays: Tensors, axis: int = 0) -> Array:
        return np.concatenate(arrays, axis)

    def take(self, a: Array, index: Any) -> Array:
        return np.asarray(a[index], order="C")

    def put(self, a: Array, index: Any, shape: Shape) -> Array:
        full = np.zeros(shape, a.dtype)
        full[index] = a
        return full

    # -- rows ----------------------------------------------------------------------------------

    def gather(self, a: Array, indices: Array) -> Array:
        return np.asarray(a[indices], order="C")

    def scatter(self, a: Array, indices: Array, rows: Array) -> None:
        a[indices] = rows

    def scatter_add(self, a: Array, indices: Array, rows: Array) -> None:
        # NumPy adds single elements, in order, several times faster than rows.
        width = prod(a.shape[1:])
        places = indices[:, None] * width + np.arange(width)
        total = widened(a)
        np.add.at(total.reshape(-1), places.reshape(-1), widened(rows).reshape(-1))
        if total is not a:
            a[...] = rounded(total, a.dtype)

    def unique(self, indices: Array) -> tuple[Array, Array]:
        distinct, places = np.unique(indices, return_inverse=True)
        return distinct, places

    # -- reductions ----------------------------------------------------------------------------

    @in_float32
    def reduce_sum(self, a: Array, axes: Axis, keepdims: bool) -> Array:
        by_channel = a.ndim > 1 and axes == tuple(range(a.ndim - 1)) and not keepdims
        if by_channel and a.dtype.kind == "f":
            return self.bias_backward(a)[1]
        return np.asarray(np.sum(a, axis=axes, dtype=a.dtype, keepdims=keepdims))

    @in_float32
    def reduce_max(self, a: Array, axes: Axis, keepdims: bool) -> Array:
        return np.asarray(np.max(a, axis=axes, keepdims=keepdims))

    @in_float32
    def argmax(self, a: Array, axis: int) -> Array:
        return np.asarray(np.argmax(a, axis=axis))

    # -- linear --------------------------------------------------------------------------------

    @in_float32
    def matmul(
        self,
        a: Array,
        b: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: Array | None = None,
    ) -> Array:
        if a.ndim == 2:
            return cpu_linear.matmul(a, b, transpose_a, transpose_b, out)
        return np.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b, out)

    @in_float32
    def dense(self, x: Array, w: Array, bias: Array, relu: bool = False) -> Array:
        return _finished(cpu_linear.matmul(x, w), bias, relu)

    def conv2d(
        self,
        x: Array,
        w: Array,
        window: Window,
        bias: Array | None = None,
        relu: bool = False,
    ) -> Array:
        if not relu:
            return cpu_linear.conv2d(x, w, window, bias)
        return self._conv2d_relu(x, w, window, bias)

    @in_float32
    def _conv2d_relu(self, x: Array, w: Array, window: Window, bias: Array | None) -> Array:
        return _finished(cpu_linear.conv2d(x, w, window), bias, relu=True)

    @in_float32
    def bias_backward(self, dy: Array, y: Array | None = None) -> tuple[Array, Array]:
        dbias = np.empty(dy.shape[-1:], dy.dtype)
        if y is None:
            channel.bias_backward(dy, dbias, threads=per_replica())
            return dy, dbias
        dz = np.empty_like(dy)
        channel.bias_backward(dy, dbias, y, dz, threads=per_replica())
        return dz, dbias

    def conv2d_backward_input(self, dy: Array, w: Array, x_shape: Shape, window: Window) -> Array:
        return cpu_linear.conv2d_backward_input(dy, w, x_shape, window)

    def conv2d_backward_filter(self, x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
        return cpu_linear.conv2d_backward_filter(x, dy, w_shape, window)

    @in_float32
    def depthwise_conv2d(self, x: Array, w: Array, window: Window) -> Array:
        y = np.empty((len(x), *window.output, x.shape[3]), x.dtype)
        depthwise.forward(x, w, y, *window.position[2:], threads=per_replica())
        return y

    @in_float32
    def depthwise_conv2d_backward_input(
        self, dy: Array, w: Array, x_shape: Shape, window: Window
    ) -> Array:
        dx = np.empty(x_shape, dy.dtype)
        depthwise.backward_input(dy, w, dx, *window.position[2:], threads=per_replica())
        return dx

    @in_float32
    def depthwise_conv2d_backward_filter(self, x: Array, dy: Array, window: Window) -> Array:
        dw = np.empty((*window.size, x.shape[3]), x.dtype)
        depthwise.backward_filter(x, dy, dw, *window.position[2:], threads=per_replica())
        return dw

    # -- pooling and normalisation -------------------------------------------------------------

    @in_float32
    def max_pool(self, x: Array, window: Window) -> tuple[Array, Array]:
        y = np.empty((x.shape[0], *window.output, x.shape[3]), x.dtype)
        winners = np.empty(y.shape, np.int32)
        layer.max_pool(x, y, winners, *window.position, threads=per_replica())
        return y, winners

    @in_float32
    def max_pool_backward(self, dy: Array, saved: Array, x_shape: Shape, window: Window) -> Array:
        dx = np.empty(x_shape, dy.dtype)
        layer.max_pool_backward(dy, saved, dx, *window.position, threads=per_replica())
        return dx

    @in_float32
    def average_pool(self, x: Array, window: Window) -> Array:
        y = np.empty((x.shape[0], *window.output, x.shape[3]), x.dtype)
        layer.average_pool(x, y, *window.position, threads=per_replica())
        return y

    @in_float32
    def average_pool_backward(self, dy: Array, x_shape: Shape, window: Window) -> Array:
        dx = np.empty(x_shape, dy.dtype)
        layer.average_pool_backward(dy, dx, *window.position, threads=per_replica())
        return dx

    @rounding()
    def moments(self, x: Array) -> tuple[Array, Array]:
        mean, variance = np.empty((2, x.shape[-1]), x.dtype)
        channel.moments(x, mean, variance, threads=per_replica())
        return mean, variance

    @in_float32
    def normalize(
        self,
        x: Array,
        mean: Array,
        variance: Array,
        scale: Array,
        offset: Array,
        epsilon: float,
        add: Array | None = None,
        relu: bool = False,
    ) -> Array:
        y = np.empty_like(x)
        channel.normalize(
            x, mean, variance, scale, offset, epsilon, y, add, relu=relu, threads=per_replica()
        )
        return y

    @rounding(0, 3)
    def normalize_backward(
        self,
        dy: Array,
        x: Array,
        mean: Array,
        variance: Array,
        scale: Array,
        epsilon: float,
        moments: bool,
        y: Array | None = None,
        add: bool = False,
    ) -> tuple[Array, Array, Array, Array | None]:
        dx = np.empty_like(x)
        dz = dy if y is None else np.empty_like(x) if add else dx
        dscale, doffset = np.empty((2, x.shape[-1]), x.dtype)
        given = (dy, x, mean, variance, scale, epsilon, moments)
        channel.normalize_backward(*given, dx, dscale, doffset, y, dz, threads=per_replica())
        return dx, dscale, doffset, dz if add else None

    @in_float32
    def layer_norm(self, x: Array, scale: Array, offset: Array, epsilon: float) -> Array:
        y = np.empty_like(x)
        tokens.layer_norm(x, scale, offset, epsilon, y, threads=per_replica())
        return y

    @rounding(0)
    def layer_norm_backward(
        self, dy: Array, x: Array, scale: Array, epsilon: float
    ) -> tuple[Array, Array, Array]:
        dx = np.empty_like(x)
        dscale, doffset = np.empty((2, x.shape[-1]), x.dtype)
        given = (dy, x, scale, epsilon)
        tokens.layer_norm_backward(*given, dx, dscale, doffset, threads=per_replica())
        return dx, dscale, doffset

    # -- attention -----------------------------------------------------------------------------

    @in_float32
    def causal_attention(self, qkv: Array, heads: int) -> Array:
        y = np.empty((*qkv.shape[:2], qkv.shape[2] // 3), qkv.dtype)
        attention.causal_attention(qkv, y, heads, threads=per_replica())
        return y

    @in_float32
    def causal_attention_backward(self, dy: Array, qkv: Array, heads: int) -> Array:
        dqkv = np.empty_like(qkv)
        attention.causal_attention_backward(dy, qkv, dqkv, heads, threads=per_replica())
        return dqkv

    # -- losses --------------------------------------------------------------------------------

    @in_float32
    def softmax(self, x: Array) -> Array:
        y = self.log_softmax(x)
        return np.exp(y, out=y)

    @in_float32
    def log_softmax(self, x: Array) -> Array:
        if not x.size:
            return np.zeros_like(x)
        y = x - np.max(x, axis=-1, keepdims=True)
        y -= np.log(np.sum(np.exp(y), axis=-1, keepdims=True))
        return y

    @in_float32
    def softmax_cross_entropy(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        losses = np.empty(len(logits), logits.dtype)
        dlogits = np.empty_like(logits)
        layer.softmax_cross_entropy(logits, labels, losses, dlogits, threads=per_replica())
        return losses, dlogits

    # -- variables -----------------------------------------------------------------------------

    def sgd(self, weights: Tensors, gradients: Tensors, **how: Unpack[Update]) -> None:
        update.sgd(weights, gradients, **how)

    def momentum(
        self,
        weights: Tensors,
        gradients: Tensors,
        momenta: Tensors,
        **how: Unpack[MomentumUpdate],
    ) -> None:
        update.momentum(weights, gradients, momenta, **how)

    def rmsprop(
        self,
        weights: Tensors,
        gradients: Tensors,
        squares: Tensors,
        momenta: Tensors,
        **how: Unpack[RMSPropUpdate],
    ) -> None:
        update.rmsprop(weights, gradients, squares, momenta, **how)

    def adam(
        self,
        weights: Tensors,
        gradients: Tensors,
        firsts: Tensors,
        seconds: Tensors,
        **how: Unpack[AdamUpdate],
    ) -> None:
        update.adam(weights, gradients, firsts, seconds, **how)

    def sum(
        self,
        destinations: Sequence[Tensors],
        sources: Sequence[Tensors],
        *,
        weights: Sequence[float] | None = None,
        scale: float = 1.0,
        threads: int = 1,
    ) -> None:
        with brought(destinations, sources) as (wanted, given):
            reduce.sum(wanted, given, weights=weights, scale=scale, threads=threads)

    def sum_squares(self, tensors: Tensors, *, threads: int) -> float:
        return reduce.sum_squares(tensors, threads=threads)

    def first_nonfinite(self, tensors: Tensors) -> int:
        return reduce.first_nonfinite([widened(tensor) for tensor in tensors])


def _finished(y: Array, bias: Array | None, relu: bool) -> Array:
    """Add a bias to y and take the ReLU, in place, as asked for.

    oneDNN could do it while it writes y, but its ReLU makes a 0 of a NaN, which nobody would find.
    """
    if bias is not None:
        channel.bias(y, bias, y, relu=relu, threads=per_replica())
    elif relu:
        layer.relu(y, y, threads=per_replica())
    return y
