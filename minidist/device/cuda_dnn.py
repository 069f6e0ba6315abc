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
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cupy
import numpy as np

from minidist.device import kernel_choice
from minidist.device.base import Array
from minidist.device.ops import Shape, Window
from minidist.dtypes import is_narrow

if TYPE_CHECKING:
    from minidist.device.cuda_stream import CudaStream

log = logging.getLogger("minidist")
PLANS = 1024  # of a stream, those of the latest calls
ALIGNED = 16  # bytes; where a graph expects its tensors, unless it is told of less


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
    if kernel_choice.name() == "gemm":
        return None
    try:
        return Convolutions(cudnn(), stream)
    except ImportError as failure:
        log.info("convolutions go through columns and cuBLAS, which takes longer: %s", failure)
        return None


class Convolution(NamedTuple):
    """One direction of a convolution: x [n, h, w, c], filter [kh, kw, c, k] -> y [n, oh, ow, k].

    `forward` takes x, the filter and, where there is one, a bias [k]; `backward_input` dy and the
    filter; `backward_filter` x and dy.
    """

    direction: str
    x: Shape
    w: Shape
    window: Window
    dtype: np.dtype[Any]
    bias: np.dtype[Any] | None = None  # its type
    relu: bool = False

    @property
    def y(self) -> Shape:
        return self.x[0], *self.window.output, self.w[3]

    @property
    def filter(self) -> Shape:
        """The filter's shape as cuDNN has it."""
        return self.w[3], *self.w[:3]

    @property
    def result(self) -> Shape:
        results = {"forward": self.y, "backward_input": self.x, "backward_filter": self.filter}
        return results[self.direction]


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
        self._plans: dict[tuple[Convolution, bool], Plan | None] = {}

    def end(self) -> None:
        self._dnn.destroy_handle(self._handle)

    # --- the three convolutions

    def forward(
        self, x: Array, w: Array, window: Window, bias: Array | None, relu: bool
    ) -> Array | None:
        """[n, h, w, c] and [kh, kw, c, k] -> [n, oh, ow, k], with a bias [k] and ReLU if wanted."""
        work = Convolution("forward", x.shape, w.shape, window, x.dtype, relu=relu)
        if bias is None:
            return self._do(work, x, w)
        return self._do(work._replace(bias=bias.dtype), x, w, bias)

    def backward_input(self, dy: Array, w: Array, x_shape: Shape, window: Window) -> Array | None:
        """Gradient of the image."""
        return self._do(Convolution("backward_input", x_shape, w.shape, window, dy.dtype), dy, w)

    def backward_filter(self, x: Array, dy: Array, w_shape: Shape, window: Window) -> Array | None:
        """Gradient of the filter."""
        return self._do(Convolution("backward_filter", x.shape, w_shape, window, x.dtype), x, dy)

    def _do(self, work: Convolution, first: Array, second: Array, *bias: Array) -> Array | None:
        plan = self._plan(work)
        if plan is None:
            uneven = work.window.before != work.window.after
            return self._do_padded(work, first, second, *bias) if uneven else None
        if work.direction != "backward_filter":
            second = _turned(second, (3, 0, 1, 2))
        result = cupy.ndarray(work.result, work.dtype)
        inputs = [_aligned(array) for array in (first, second, *bias)]  # alive until it is given
        arrays = zip(plan.tensors, (*inputs, result), strict=True)
        workspace = cupy.ndarray((plan.workspace,), np.uint8)  # free for what is given next
        plan.graph.execute(
            {tensor: int(array.data.ptr) for tensor, array in arrays},
            int(workspace.data.ptr),
            self._handle,
        )
        return _turned(result, (1, 2, 3, 0)) if work.direction == "backward_filter" else result

    def _do_padded(self, work: Convolution, first: Array, *rest: Array) -> Array | None:
        """Do the same with the padding written out: few plans take one that differs by side."""
        window = work.window
        whole = work._replace(
            x=_padded_shape(work.x, window), window=window._replace(before=(0, 0), after=(0, 0))
        )
        if work.direction != "backward_input":
            return self._do(whole, _padded(first, window), *rest)
        dx = self._do(whole, first, *rest)
        return None if dx is None else _in_one_piece(dx[_image(work.x, window)])

    # --- their graphs: inputs in the order of the arrays, then the output

    def _forward(self, graph: Any, work: Convolution) -> list[Any]:
        inputs = [self._tensor(graph, shape, work.dtype) for shape in (work.x, work.filter)]
        y = graph.conv_fprop(image=inputs[0], weight=inputs[1], **_where(work.window))
        if work.bias is not None:
            inputs.append(self._tensor(graph, (1, 1, 1, work.w[3]), work.bias))
            y = graph.bias(input=y, bias=inputs[2])
        if work.relu:
            y = graph.relu(input=y)
        return [*inputs, y]

    def _backward_input(self, graph: Any, work: Convolution) -> list[Any]:
        dy, w = (self._tensor(graph, shape, work.dtype) for shape in (work.y, work.filter))
        return [dy, w, graph.conv_dgrad(loss=dy, filter=w, **_where(work.window))]

    def _backward_filter(self, graph: Any, work: Convolution) -> list[Any]:
        x, dy = (self._tensor(graph, shape, work.dtype) for shape in (work.x, work.y))
        return [x, dy, graph.conv_wgrad(image=x, loss=dy, **_where(work.window))]

    _graphs: ClassVar = {
        "forward": _forward,
        "backward_input": _backward_input,
        "backward_filter": _backward_filter,
    }

    def _tensor(self, graph: Any, shape: Shape, dtype: np.dtype[Any]) -> Any:
        dim, stride = _channels_last(shape)
        return graph.tensor(dim=dim, stride=stride, data_type=self._types[dtype.name])

    # --- plans

    def _plan(self, work: Convolution) -> Plan | None:
        tf32 = os.environ.get("CUPY_TF32") == "1"
        key = work, tf32
        if key not in self._plans:
            while len(self._plans) >= PLANS:
                del self._plans[next(iter(self._plans))]
            possible = work.dtype.name in self._types and 0 not in (*work.x, *work.w)
            self._plans[key] = None
            if possible:
                self._plans[key] = self._made(work, tf32)
        self._plans[key] = plan = self._plans.pop(key)  # the latest is the last
        return plan

    def _made(self, work: Convolution, tf32: bool) -> Plan | None:
        dnn, float32 = self._dnn, self._dnn.data_type.FLOAT
        graph = dnn.pygraph(
            io_data_type=self._types[work.dtype.name],
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
        )
        notes = dnn.numerical_note
        unwanted = [notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION]
        if not (is_narrow(work.dtype) or tf32):
            unwanted += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
        try:
            tensors = self._graphs[work.direction](self, graph, work)
            dim, stride = _channels_last(work.result)
            result = tensors[-1].set_dim(dim).set_stride(stride)
            result.set_data_type(self._types[work.dtype.name]).set_output(True)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([dnn.heur_mode.A, dnn.heur_mode.FALLBACK])
            graph.deselect_numeric_notes(unwanted)
            if work.relu:
                graph.select_numeric_notes([notes.STRICT_NAN_PROP])
            graph.check_support()
            graph.build_plans()
        except (dnn.cudnnGraphNotSupportedError, RuntimeError, NotImplementedError) as failure:
            log.info("cuDNN does not do %s: %s", work, failure)
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


def _aligned(a: Array) -> Array:
    """Return an array where cuDNN can read it: a part of another one may lie anywhere."""
    if a.data.ptr % ALIGNED == 0:
        return a
    copy = cupy.ndarray(a.shape, a.dtype)
    _bits(copy)[...] = _bits(a)
    return copy


def _turned(a: Array, axes: tuple[int, ...]) -> Array:
    """Return an array with its axes in another order."""
    return _in_one_piece(_bits(a).transpose(axes)).view(a.dtype)


def _in_one_piece(a: Array) -> Array:
    return a if a.flags.c_contiguous else cupy.ascontiguousarray(_bits(a)).view(a.dtype)
