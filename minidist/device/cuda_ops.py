"""CudaOps: the arithmetic on a GPU, by CuPy, cuBLAS and the kernels of `minidist.kernels`.

A verb gives work to the GPU and returns; `host_view` and what returns numbers wait. The kernels
take narrow arrays as they are, and so does cuBLAS; CuPy gets them widened to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import cupy
import numpy as np

from minidist.device.base import Array
from minidist.device.cuda_attention import attend, attend_backward
from minidist.device.cuda_blas import multiply
from minidist.device.cuda_convolution import convolve, convolve_filter, convolve_input
from minidist.device.cuda_machine import CudaMachine
from minidist.device.cuda_order import in_order, ordered
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
from minidist.dtypes import as_array, as_dtype, is_narrow, kind
from minidist.kernels import (
    gpu_bias,
    gpu_layer,
    gpu_norm,
    gpu_reduce,
    gpu_tokens,
    gpu_update,
    gpu_window,
)
from minidist.kernels.grid import wide

if TYPE_CHECKING:
    from minidist.device.cuda import CudaDevice
    from minidist.device.cuda_dnn import Convolutions

Verb = TypeVar("Verb", bound=Callable[..., Any])


def _in_float32(verb: Verb) -> Verb:
    """Let a verb that CuPy does take narrow arrays: widened, and its result is rounded once."""

    @wraps(verb)
    def narrow_or_not(self: CudaOps, first: Array, *rest: Any, **options: Any) -> Any:
        if first.itemsize != 2:
            return verb(self, first, *rest, **options)
        return self._compute(lambda *a: verb(self, *a, **options), first, *rest)

    return narrow_or_not  # type: ignore[return-value]


@in_order
class CudaOps(Ops):
    """CuPy arrays, C-contiguous. `device`: where they are, and whose streams do the work."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._machine = CudaMachine(device)

    # -- arrays ------------------------------------------------------------------------------

    def host_view(self, a: Array) -> np.ndarray[Any, Any]:
        values = np.empty(a.shape, a.dtype)
        self.device.fetch([values], [a])
        values.flags.writeable = False
        return values

    def full(self, shape: Shape, value: float, dtype: Any) -> Array:
        a = cupy.ndarray(shape, as_dtype(dtype))
        self.fill(a, value)
        return a

    def fill(self, a: Array, value: float) -> None:
        if is_narrow(a.dtype):
            a.view(np.uint16).fill(int(as_array(value, a.dtype).view(np.uint16)))
        else:
            a.fill(value)

    def copy(self, a: Array) -> Array:
        b = cupy.ndarray(a.shape, a.dtype)
        _bits(b)[...] = _bits(a)
        return b

    def share_memory(self, a: Array, b: Array) -> bool:
        if a.data.mem.block is not b.data.mem.block:
            return False
        return bool(a.data.ptr < b.data.ptr + b.nbytes and b.data.ptr < a.data.ptr + a.nbytes)

    def cast(self, a: Array, dtype: Any) -> Array:
        dtype = as_dtype(dtype)
        if a.dtype == dtype:
            return self.copy(a)
        if kind(a.dtype) == kind(dtype) == "f":
            b = cupy.ndarray(a.shape, dtype)
            gpu_reduce.cast(self._machine, [b], [a])
            return b
        if is_narrow(a.dtype):
            return self._widened(a).astype(dtype)
        if is_narrow(dtype):
            return self.cast(a.astype(np.float64), dtype)
        return a.astype(dtype)

    def convert(self, destinations: Tensors, sources: Tensors, *, threads: int) -> None:
        pairs: dict[Any, tuple[list[Array], list[Array]]] = {}
        for into, array in zip(destinations, sources, strict=True):
            columns = pairs.setdefault((into.dtype, array.dtype), ([], []))
            columns[0].append(into)
            columns[1].append(array)
        for (to, dtype), (wanted, given) in pairs.items():
            if kind(to) == kind(dtype) == "f":
                gpu_reduce.cast(self._machine, wanted, given)
                continue
            for into, array in zip(wanted, given, strict=True):
                _bits(into)[...] = _bits(self.cast(array, to))

    def at_once(self, function: Callable[..., Any], *arrays: Array) -> Any:
        return self._compute(function, *arrays) if is_narrow(arrays[0].dtype) else function(*arrays)

    # -- elementwise ---------------------------------------------------------------------------

    @_in_float32
    def add(self, a: Array, b: Array) -> Array:
        return cupy.add(a, b)

    @_in_float32
    def subtract(self, a: Array, b: Array) -> Array:
        return cupy.subtract(a, b)

    @_in_float32
    def multiply(self, a: Array, b: Array) -> Array:
        return cupy.multiply(a, b)

    @_in_float32
    def divide(self, a: Array, b: Array) -> Array:
        return cupy.divide(a, b)

    @_in_float32
    def power(self, a: Array, exponent: float) -> Array:
        return cupy.power(a, exponent)

    @_in_float32
    def negative(self, a: Array) -> Array:
        return cupy.negative(a)

    @_in_float32
    def exp(self, a: Array) -> Array:
        return cupy.exp(a)

    @_in_float32
    def log(self, a: Array) -> Array:
        return cupy.log(a)

    @_in_float32
    def sqrt(self, a: Array) -> Array:
        return cupy.sqrt(a)

    def compare(self, relation: str, a: Array, b: Array) -> Array:
        relations = {"equal": cupy.equal, "less": cupy.less, "less_equal": cupy.less_equal}
        return relations[relation](self._widened(a), self._widened(b))

    def accumulate(self, a: Array, b: Array) -> None:
        if is_narrow(a.dtype):
            _bits(a)[...] = _bits(self.add(a, b))
        else:
            cupy.add(a, b, out=a)

    def relu(self, x: Array) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_layer.relu(self._machine, x, y)
        return y

    def relu_backward(self, dy: Array, y: Array) -> Array:
        dx = cupy.ndarray(y.shape, y.dtype)
        gpu_layer.relu_backward(self._machine, dy, y, dx)
        return dx

    def relu6(self, x: Array) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_layer.relu6(self._machine, x, y)
        return y

    def relu6_backward(self, dy: Array, y: Array) -> Array:
        dx = cupy.ndarray(y.shape, y.dtype)
        gpu_layer.relu6_backward(self._machine, dy, y, dx)
        return dx

    def gelu(self, x: Array) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_tokens.gelu(self._machine, x, y)
        return y

    def gelu_backward(self, dy: Array, x: Array) -> Array:
        dx = cupy.ndarray(x.shape, x.dtype)
        gpu_tokens.gelu_backward(self._machine, dy, x, dx)
        return dx

    def dropout(self, x: Array, rate: float, key: Words, counter: Words) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_layer.dropout(self._machine, x, y, rate, key, counter)
        return y

    # -- shapes --------------------------------------------------------------------------------

    def reshape(self, a: Array, shape: Shape) -> Array:
        return a.reshape(shape)

    def transpose(self, a: Array, axes: Axis) -> Array:
        return _like(a, _in_one_piece(_bits(a).transpose(axes)))

    def broadcast_to(self, a: Array, shape: Shape) -> Array:
        full = cupy.ndarray(shape, a.dtype)
        _bits(full)[...] = _bits(a)
        return full

    def concatenate(self, arrays: Tensors, axis: int = 0) -> Array:
        return _like(arrays[0], cupy.concatenate([_bits(array) for array in arrays], axis))

    def take(self, a: Array, index: Any) -> Array:
        return _like(a, _in_one_piece(_bits(a)[index]))

    def put(self, a: Array, index: Any, shape: Shape) -> Array:
        full = cupy.ndarray(shape, a.dtype)
        _bits(full).fill(0)
        _bits(full)[index] = _bits(a)
        return full

    # -- rows ----------------------------------------------------------------------------------

    def gather(self, a: Array, indices: Array) -> Array:
        return _like(a, cupy.take(_bits(a), indices, axis=0))

    def scatter(self, a: Array, indices: Array, rows: Array) -> None:
        _bits(a)[indices] = _bits(rows)

    def scatter_add(self, a: Array, indices: Array, rows: Array) -> None:
        order = cupy.argsort(indices, kind="stable")
        gpu_layer.scatter_add(self._machine, a, cupy.take(indices, order), order, rows)

    def unique(self, indices: Array) -> tuple[Array, Array]:
        distinct, places = cupy.unique(indices, return_inverse=True)
        return distinct, places.astype(np.int64, copy=False)

    # -- reductions ----------------------------------------------------------------------------

    @_in_float32
    def reduce_sum(self, a: Array, axes: Axis, keepdims: bool) -> Array:
        return cupy.sum(a, axis=axes, dtype=a.dtype, keepdims=keepdims)

    @_in_float32
    def reduce_max(self, a: Array, axes: Axis, keepdims: bool) -> Array:
        return cupy.max(a, axis=axes, keepdims=keepdims)

    @_in_float32
    def argmax(self, a: Array, axis: int) -> Array:
        return cupy.argmax(a, axis=axis)

    # -- linear --------------------------------------------------------------------------------

    def matmul(
        self,
        a: Array,
        b: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out: Array | None = None,
    ) -> Array:
        rows, columns = a.shape[-2 + transpose_a], b.shape[-1 - transpose_b]
        if out is None:
            out = cupy.ndarray((*a.shape[:-2], rows, columns), a.dtype)
        each = [a, b, out]
        if a.ndim > 2:
            pairs = prod(a.shape[:-2])
            each = [array.reshape(pairs, *array.shape[-2:]) for array in each]
        how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        multiply(self._machine.blas, *each, **how)
        return out

    def dense(self, x: Array, w: Array, bias: Array, relu: bool = False) -> Array:
        product = cupy.ndarray((len(x), w.shape[1]), wide(x.dtype.name))
        multiply(self._machine.blas, x, w, product)
        narrow = is_narrow(x.dtype)
        y = cupy.ndarray(product.shape, x.dtype) if narrow else product
        gpu_bias.bias(self._machine, product, bias, y, relu=relu)
        return y

    def conv2d(
        self,
        x: Array,
        w: Array,
        window: Window,
        bias: Array | None = None,
        relu: bool = False,
    ) -> Array:
        dnn = self._dnn(window)
        y = None if dnn is None else dnn.forward(x, w, window, bias, relu)
        if y is not None:
            return y
        if dnn is not None and relu:
            y = dnn.forward(x, w, window, bias, False)
        if y is None:
            y = convolve(self._machine, x, w, window)
            if bias is not None:
                gpu_bias.bias(self._machine, y, bias, y, relu=relu)
                return y
        if relu:
            gpu_layer.relu(self._machine, y, y)
        return y

    def _dnn(self, window: Window) -> Convolutions | None:
        """Return cuDNN, unless a convolution is nothing but a matrix product."""
        return None if window.is_pointwise else self._machine.dnn

    def bias_backward(self, dy: Array, y: Array | None = None) -> tuple[Array, Array]:
        dbias = cupy.ndarray(dy.shape[-1:], dy.dtype)
        dz = dy if y is None else cupy.ndarray(dy.shape, dy.dtype)
        gpu_bias.bias_backward(self._machine, dy, dbias, y, None if y is None else dz)
        return dz, dbias

    def conv2d_backward_input(self, dy: Array, w: Array, x_shape: Shape, window: Window) -> Array:
        dnn = self._dnn(window)
        dx = None if dnn is None else dnn.backward_input(dy, w, x_shape, window)
        return convolve_input(self._machine, dy, w, x_shape, window) if dx is None else dx

    def conv2d_backward_filter(self, x: Array, dy: Array, w_shape: Shape, window: Window) -> Array:
        dnn = self._dnn(window)
        dw = None if dnn is None else dnn.backward_filter(x, dy, w_shape, window)
        if dw is None:
            dw = self._rounded(convolve_filter(self._machine, x, dy, w_shape, window), x.dtype)
        return dw

    def depthwise_conv2d(self, x: Array, w: Array, window: Window) -> Array:
        y = cupy.ndarray((len(x), *window.output, x.shape[3]), x.dtype)
        gpu_window.depthwise(self._machine, x, w, y, window.position)
        return y

    def depthwise_conv2d_backward_input(
        self, dy: Array, w: Array, x_shape: Shape, window: Window
    ) -> Array:
        dx = cupy.ndarray(x_shape, dy.dtype)
        gpu_window.depthwise_backward_input(self._machine, dy, w, dx, window.position)
        return dx

    def depthwise_conv2d_backward_filter(self, x: Array, dy: Array, window: Window) -> Array:
        dw = cupy.ndarray((*window.size, x.shape[3]), x.dtype)
        gpu_window.depthwise_backward_filter(self._machine, x, dy, dw, window.position)
        return dw

    # -- pooling and normalisation -------------------------------------------------------------

    def max_pool(self, x: Array, window: Window) -> tuple[Array, Array]:
        y = cupy.ndarray((len(x), *window.output, x.shape[3]), x.dtype)
        winners = cupy.ndarray(y.shape, np.int32)
        gpu_window.max_pool(self._machine, x, y, winners, window.position)
        return y, winners

    def max_pool_backward(self, dy: Array, saved: Array, x_shape: Shape, window: Window) -> Array:
        dx = cupy.ndarray(x_shape, dy.dtype)
        gpu_window.max_pool_backward(self._machine, dy, saved, dx, window.position)
        return dx

    def average_pool(self, x: Array, window: Window) -> Array:
        y = cupy.ndarray((len(x), *window.output, x.shape[3]), x.dtype)
        gpu_window.average_pool(self._machine, x, y, window.position)
        return y

    def average_pool_backward(self, dy: Array, x_shape: Shape, window: Window) -> Array:
        dx = cupy.ndarray(x_shape, dy.dtype)
        gpu_window.average_pool_backward(self._machine, dy, dx, window.position)
        return dx

    def moments(self, x: Array) -> tuple[Array, Array]:
        mean, variance = (cupy.ndarray(x.shape[-1:], wide(x.dtype.name)) for _ in range(2))
        gpu_norm.moments(self._machine, x, mean, variance)
        return mean, variance

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
        y = cupy.ndarray(x.shape, x.dtype)
        columns = (mean, variance, scale, offset, epsilon)
        gpu_norm.normalize(self._machine, x, *columns, y, add, relu)
        return y

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
        dz = cupy.ndarray(x.shape, x.dtype) if add and y is not None else None
        dx = cupy.ndarray(x.shape, x.dtype)
        dscale, doffset = (cupy.ndarray(scale.shape, scale.dtype) for _ in range(2))
        given = (dy, x, mean, variance, scale, epsilon, moments)
        gpu_norm.normalize_backward(self._machine, *given, dx, dscale, doffset, y, dz)
        return dx, dscale, doffset, dy if add and y is None else dz

    def layer_norm(self, x: Array, scale: Array, offset: Array, epsilon: float) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_tokens.layer_norm(self._machine, x, scale, offset, epsilon, y)
        return y

    def layer_norm_backward(
        self, dy: Array, x: Array, scale: Array, epsilon: float
    ) -> tuple[Array, Array, Array]:
        dx = cupy.ndarray(x.shape, x.dtype)
        dscale, doffset = (cupy.ndarray(scale.shape, scale.dtype) for _ in range(2))
        gpu_tokens.layer_norm_backward(self._machine, dy, x, scale, epsilon, dx, dscale, doffset)
        return dx, dscale, doffset

    # -- attention -----------------------------------------------------------------------------

    @_in_float32
    def causal_attention(self, qkv: Array, heads: int) -> Array:
        return attend(self._machine, qkv, heads)

    @_in_float32
    def causal_attention_backward(self, dy: Array, qkv: Array, heads: int) -> Array:
        return attend_backward(self._machine, dy, qkv, heads)

    # -- losses --------------------------------------------------------------------------------

    def softmax(self, x: Array) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_layer.softmax(self._machine, x, y)
        return y

    def log_softmax(self, x: Array) -> Array:
        y = cupy.ndarray(x.shape, x.dtype)
        gpu_layer.log_softmax(self._machine, x, y)
        return y

    def softmax_cross_entropy(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        losses = cupy.ndarray(logits.shape[:1], logits.dtype)
        dlogits = cupy.ndarray(logits.shape, logits.dtype)
        gpu_layer.softmax_cross_entropy(self._machine, logits, labels, losses, dlogits)
        return losses, dlogits

    # -- variables -----------------------------------------------------------------------------

    def sgd(self, weights: Tensors, gradients: Tensors, **how: Unpack[Update]) -> None:
        gpu_update.sgd(self._machine, weights, gradients, **_on_gpu(how))

    def momentum(
        self,
        weights: Tensors,
        gradients: Tensors,
        momenta: Tensors,
        **how: Unpack[MomentumUpdate],
    ) -> None:
        gpu_update.momentum(self._machine, weights, gradients, momenta, **_on_gpu(how))

    def rmsprop(
        self,
        weights: Tensors,
        gradients: Tensors,
        squares: Tensors,
        momenta: Tensors,
        **how: Unpack[RMSPropUpdate],
    ) -> None:
        gpu_update.rmsprop(self._machine, weights, gradients, squares, momenta, **_on_gpu(how))

    def adam(
        self,
        weights: Tensors,
        gradients: Tensors,
        firsts: Tensors,
        seconds: Tensors,
        **how: Unpack[AdamUpdate],
    ) -> None:
        gpu_update.adam(self._machine, weights, gradients, firsts, seconds, **_on_gpu(how))

    def sum(
        self,
        destinations: Sequence[Tensors],
        sources: Sequence[Tensors],
        *,
        weights: Sequence[float] | None = None,
        scale: float = 1.0,
        threads: int = 1,
    ) -> None:
        gpu_reduce.sum(self._machine, destinations, sources, weights=weights, scale=scale)

    def sum_squares(self, tensors: Tensors, *, threads: int) -> float:
        return float(self.host_view(self._sum_squares(tensors))[0])

    @ordered
    def _sum_squares(self, tensors: Tensors) -> Array:
        return gpu_reduce.sum_squares(self._machine, tensors)

    def first_nonfinite(self, tensors: Tensors) -> int:
        found = int(self.host_view(self._first_nonfinite(tensors))[0])
        return found if found < len(tensors) else -1

    @ordered
    def _first_nonfinite(self, tensors: Tensors) -> Array:
        return gpu_reduce.first_nonfinite(self._machine, tensors)

    # -- narrow arrays -------------------------------------------------------------------------

    def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments), in float32, with results rounded to the first's dtype."""
        dtype = arguments[0].dtype
        results = function(*map(self._widened, arguments))
        if isinstance(results, tuple):
            return tuple(self._rounded(result, dtype) for result in results)
        return self._rounded(results, dtype)

    def _widened(self, value: Any) -> Any:
        narrow = isinstance(value, cupy.ndarray) and is_narrow(value.dtype)
        return self.cast(value, np.float32) if narrow else value

    def _rounded(self, value: Array, dtype: np.dtype[Any]) -> Array:
        narrow = is_narrow(dtype) and value.dtype == np.float32
        return self.cast(value, dtype) if narrow else value


def _in_one_piece(a: Array) -> Array:
    return a if a.flags.c_contiguous else cupy.ascontiguousarray(a)


def _on_gpu(how: Update) -> dict[str, Any]:
    """Return what a rule takes on a GPU, which has no use for a number of threads."""
    return {name: value for name, value in how.items() if name != "threads"}


def _bits(a: Array) -> Array:
    """Return a narrow array as integers, for what only moves elements: CuPy knows those."""
    return a.view(np.uint16) if is_narrow(a.dtype) else a


def _like(a: Array, moved: Array) -> Array:
    """Return what has become of `_bits(a)` in a's dtype."""
    return moved.view(a.dtype) if is_narrow(a.dtype) else moved
