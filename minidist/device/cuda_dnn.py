"""Convolutions by cuDNN: a graph for each shape is planned once and runs on arrays where they lie.

Images are channels last, [n, h, w, c], as cuDNN has them the fastest; it wants filters as
[k, kh, kw, c], so ours, [kh, kw, c, k], and their gradients are turned around: they are small. Bias
and ReLU are done by the same kernel as the convolution. Elements of 16 bits are added up in
float32.

A plan is left out unless it gives the same bits each time, for float32 without CUPY_TF32=1 unless
it multiplies all 24 bits, and with a ReLU unless NaN stays NaN. Where cuDNN has no plan for a shape
the answer is None, and columns and cuBLAS (cuda_convolution.py) do it; so it is for float64 and for
empty arrays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
import numpy as np

from minidist.device import cpu_linear
from minidist.device.base import Array
from minidist.device.ops import Shape, Window
from minidist.dtypes import is_narrow

if TYPE_CHECKING:
    from minidist.device.cuda_stream import CudaStream

log = logging.getLogger("minidist")
PLANS = 1024  # of a stream, those of the latest calls


@cache
def cudnn() -> Any:
    """Return the package; raises ImportError, which says what is missing."""
    try:
        package = import_module("cudnn")
    except ImportError as failure:
        raise ImportError(
            f"cuDNN's frontend cannot be imported ({failure}); pip install nvidia-cudnn-frontend"
        ) from failure
    try:
        package.backend_version()
    except RuntimeError as failure:
        raise ImportError(
            f"cuDNN itself is not there ({failure}); pip install nvidia-cudnn-cu12, or "
            "nvidia-cudnn-cu13 for CUDA 13"
        ) from failure
    return package


def convolutions(stream: CudaStream) -> Convolutions | None:
    """Return what does convolutions on a stream by cuDNN, or None where there is none.

    Or where MINIDIST_KERNELS=gemm wants everything to be products of matrices.
    """
    if cpu_linear.kernels() == "gemm":
        return None
    try:
        return Convolutions(cudnn(), stream)
    except ImportError as failure:
        log.info("convolutions go through columns and cuBLAS, which takes longer: %s", failure)
        return None


class Plan(NamedTuple):
    """A graph that can run: its inputs in the order of the arrays, then its output."""

    graph: Any
    tensors: Sequence[Any]
    workspace: int  # bytes


class Convolutions:
    """Plans and cuDNN's handle for one stream, to which all that is asked for here is given."""

    def __init__(self, dnn: Any, stream: CudaStream) -> None:
        self._dnn = dnn
        self._types = {
            "float32": dnn.data_type.FLOAT,
            "float16": dnn.data_type.HALF,
            "bfloat16": dnn.data_type.BFLOAT16,
        }
        self._handle = dnn.create_handle()  # of the current GPU
        dnn.set_stream(handle=self._handle, stream=stream.raw.ptr)
        self._plans: dict[Any, Plan | None] = {}

    def end(self) -> None:
        self._dnn.destroy_handle(self._handle)

    # --- the three convolutions

    def forward(
        self, x: Array, w: Array, window: Window, bias: Array | None, relu: bool
    ) -> Array | None:
        """[n, h, w, c] and [kh, kw, c, k] -> [n, oh, ow, k], with a bias [k] and ReLU if wanted."""
        kind = "forward", x.shape, w.shape, window, None if bias is None else bias.dtype.name, relu
        plan = self._plan(
            x.dtype, kind, lambda graph: self._forward(graph, x, w, window, bias, relu), relu
        )
        if plan is None and window.before != window.after:
            return self.forward(_padded(x, window), w, _inside(window), bias, relu)
        if plan is None:
            return None
        y = cupy.ndarray((len(x), *window.output, w.shape[3]), x.dtype)
        self._run(plan, x, _turned(w, (3, 0, 1, 2)), *(() if bias is None else (bias,)), y)
        return y

    def backward_input(self, dy: Array, w: Array, x_shape: Shape, window: Window) -> Array | None:
        """Gradient of the image."""
        kind = "input", x_shape, w.shape, window
        plan = self._plan(dy.dtype, kind, lambda graph: self._input(graph, dy, w, x_shape, window))
        if plan is None and window.before != window.after:
            whole = self.backward_input(dy, w, _padded_shape(x_shape, window), _inside(window))
            return None if whole is None else _in_one_piece(whole[_image(x_shape, window)])
        if plan is None:
            return None
        dx = cupy.ndarray(x_shape, dy.dtype)
        self._run(plan, dy, _turned(w, (3, 0, 1, 2)), dx)
        return dx

    def backward_filter(self, x: Array, dy: Array, w_shape: Shape, window: Window) -> Array | None:
        """Gradient of the filter."""
        kind = "filter", x.shape, w_shape, window
        plan = self._plan(x.dtype, kind, lambda graph: self._filter(graph, x, dy, w_shape, window))
        if plan is None and window.before != window.after:
            return self.backward_filter(_padded(x, window), dy, w_shape, _inside(window))
        if plan is None:
            return None
        dw = cupy.ndarray((w_shape[3], *w_shape[:3]), x.dtype)
        self._run(plan, x, dy, dw)
        return _turned(dw, (1, 2, 3, 0))

    def _run(self, plan: Plan, *arrays: Array) -> None:
        places = {t: int(a.data.ptr) for t, a in zip(plan.tensors, arrays, strict=True)}
        workspace = cupy.ndarray((plan.workspace,), np.uint8)  # free for what is given next
        plan.graph.execute(places, int(workspace.data.ptr), self._handle)

    # --- their graphs

    def _forward(
        self, graph: Any, x: Array, w: Array, window: Window, bias: Array | None, relu: bool
    ) -> list[Any]:
        inputs = [self._images(graph, x.shape, x.dtype), self._filters(graph, w.shape, w.dtype)]
        y = graph.conv_fprop(image=inputs[0], weight=inputs[1], **_where(window))
        if bias is not None:
            inputs.append(self._images(graph, (1, 1, 1, len(bias)), bias.dtype))
            y = graph.bias(input=y, bias=inputs[2])
        if relu:
            y = graph.relu(input=y)
        return [*inputs, self._out(y, (len(x), *window.output, w.shape[3]), x.dtype)]

    def _input(self, graph: Any, dy: Array, w: Array, x_shape: Shape, window: Window) -> list[Any]:
        inputs = [self._images(graph, dy.shape, dy.dtype), self._filters(graph, w.shape, w.dtype)]
        dx = graph.conv_dgrad(loss=inputs[0], filter=inputs[1], **_where(window))
        return [*inputs, self._out(dx, x_shape, dy.dtype)]

    def _filter(self, graph: Any, x: Array, dy: Array, w_shape: Shape, window: Window) -> list[Any]:
        inputs = [self._images(graph, x.shape, x.dtype), self._images(graph, dy.shape, x.dtype)]
        dw = graph.conv_wgrad(image=inputs[0], loss=inputs[1], **_where(window))
        return [*inputs, self._out(dw, (w_shape[3], *w_shape[:3]), x.dtype)]

    def _images(self, graph: Any, shape: Shape, dtype: Any) -> Any:
        dim, stride = _channels_last(shape)
        return graph.tensor(dim=dim, stride=stride, data_type=self._types[dtype.name])

    def _filters(self, graph: Any, shape: Shape, dtype: Any) -> Any:
        return self._images(graph, (shape[3], *shape[:3]), dtype)

    def _out(self, tensor: Any, shape: Shape, dtype: Any) -> Any:
        dim, stride = _channels_last(shape)
        tensor.set_dim(dim).set_stride(stride).set_data_type(self._types[dtype.name])
        return tensor.set_output(True)

    # --- plans

    def _plan(
        self,
        dtype: Any,
        kind: tuple[Any, ...],
        make: Callable[[Any], list[Any]],
        relu: bool = False,
    ) -> Plan | None:
        tf32 = os.environ.get("CUPY_TF32") == "1"
        key = dtype.name, tf32, kind
        if key not in self._plans:
            while len(self._plans) >= PLANS:
                del self._plans[next(iter(self._plans))]
            possible = dtype.name in self._types and 0 not in (*kind[1], *kind[2])
            self._plans[key] = None
            if possible:
                self._plans[key] = self._made(dtype, tf32, kind, make, relu)
        self._plans[key] = plan = self._plans.pop(key)  # the latest is the last
        return plan

    def _made(
        self,
        dtype: Any,
        tf32: bool,
        kind: tuple[Any, ...],
        make: Callable[[Any], list[Any]],
        relu: bool,
    ) -> Plan | None:
        dnn, float32 = self._dnn, self._dnn.data_type.FLOAT
        graph = dnn.pygraph(
            io_data_type=self._types[dtype.name],
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
        )
        notes = dnn.numerical_note
        unwanted = [notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION]
        if not (is_narrow(dtype) or tf32):
            unwanted += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
        try:
            tensors = make(graph)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([dnn.heur_mode.A, dnn.heur_mode.FALLBACK])
            graph.deselect_numeric_notes(unwanted)
            if relu:
                graph.select_numeric_notes([notes.STRICT_NAN_PROP])
            graph.check_support()
            graph.build_plans()
        except (dnn.cudnnGraphNotSupportedError, RuntimeError, NotImplementedError) as failure:
            log.info("cuDNN does not do %s of %s: %s", kind, dtype.name, failure)
            return None
        return Plan(graph, tensors, int(graph.get_workspace_size()))


def _channels_last(shape: Shape) -> tuple[list[int], list[int]]:
    """Return lengths and strides, in cuDNN's order n, c, h, w, of what is stored as n, h, w, c."""
    n, h, w, c = shape
    return [n, c, h, w], [h * w * c, 1, w * c, c]


def _where(window: Window) -> dict[str, list[int]]:
    return {
        "pre_padding": list(window.before),
        "post_padding": list(window.after),
        "stride": list(window.strides),
        "dilation": [1, 1],
    }


# --- padding that is not the same on both sides, which few plans take: it is written out


def _inside(window: Window) -> Window:
    return window._replace(before=(0, 0), after=(0, 0))


def _padded_shape(shape: Shape, window: Window) -> Shape:
    rows, columns = (b + a for b, a in zip(window.before, window.after, strict=True))
    return shape[0], shape[1] + rows, shape[2] + columns, shape[3]


def _image(shape: Shape, window: Window) -> tuple[slice, slice, slice]:
    """Return where the image is in the padded one."""
    top, left = window.before
    return slice(None), slice(top, top + shape[1]), slice(left, left + shape[2])


def _padded(x: Array, window: Window) -> Array:
    whole = cupy.ndarray(_padded_shape(x.shape, window), x.dtype)
    whole.view(np.uint8).fill(0)
    _bits(whole)[_image(x.shape, window)] = _bits(x)
    return whole


def _bits(a: Array) -> Array:
    return a.view(np.uint16) if is_narrow(a.dtype) else a


def _turned(a: Array, axes: tuple[int, ...]) -> Array:
    """Return an array with its axes in another order."""
    return _in_one_piece(_bits(a).transpose(axes)).view(a.dtype)


def _in_one_piece(a: Array) -> Array:
    return a if a.flags.c_contiguous else cupy.ascontiguousarray(_bits(a)).view(a.dtype)
