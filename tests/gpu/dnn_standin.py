"""A stand-in for cuDNN's frontend, beside that for CuPy, as far as minidist uses it.

What a graph computes is written out with NumPy, place by place of the filter, in float64. It is
done when the stream comes to it, with scratch memory that a plan really fills.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from emulator import TYPES
from standin import at

WORKSPACE = 4096  # bytes
ALIGNED = 16  # bytes; what the frontend declares of tensors

Values = Callable[[dict[Any, np.ndarray]], np.ndarray]  # of a tensor, from those that are given


class NotSupported(Exception):
    """cudnn.cudnnGraphNotSupportedError."""


class Tensor:
    """An array [n, c, h, w] of a graph, with strides in elements."""

    def __init__(self, dim: Any, stride: Any, data_type: Any, values: Values | None = None) -> None:
        self.dim, self.stride, self.data_type = dim, stride, data_type
        self.is_output = False
        self.values: Values = values or (lambda given: given[self])

    def set_dim(self, dim: list[int]) -> Tensor:
        assert self.dim is None or self.dim == dim, f"{self.dim} has been inferred, not {dim}"
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> Tensor:
        self.data_type = data_type
        return self

    def set_output(self, value: bool) -> Tensor:
        self.is_output = value
        return self

    def view(self, address: int) -> np.ndarray:
        assert address % ALIGNED == 0, "a plan reads whole vectors"
        dtype = TYPES[self.data_type]
        # Channels last is the layout of convolutions on tensor cores.
        n, c, h, w = self.dim
        assert self.stride == [h * w * c, 1, w * c, c]
        flat = at(address, math.prod(self.dim) * dtype.itemsize).view(dtype)
        return flat.reshape(n, h, w, c).transpose(0, 3, 1, 2)


class Handle:
    stream = 0


def set_stream(handle: Handle, stream: int) -> None:
    handle.stream = stream


class pygraph:
    """A graph, of the module `_cudnn` that makes it, for the GPUs of CuPy's stand-in."""

    _cudnn: Any
    _cupy: Any

    def __init__(
        self,
        *,
        io_data_type: Any,
        intermediate_data_type: Any,
        compute_data_type: Any,
        handle: Handle,
    ) -> None:
        assert intermediate_data_type == compute_data_type == "float32"
        self.io_data_type, self.handle = io_data_type, handle
        self.barred: list[str] = []
        self.wanted: list[str] = []
        self._out: list[Tensor] = []
        self._uneven = False

    def tensor(self, *, dim: list[int], stride: list[int], data_type: str) -> Tensor:
        return Tensor(dim, stride, data_type)

    def _derived(self, dim: Any, values: Values) -> Tensor:
        self._out = [Tensor(dim, None, None, values)]
        return self._out[0]

    def _places(self, how: dict[str, Any], filters: Any) -> list[tuple[int, int, Any]]:
        self._uneven = how["pre_padding"] != how["post_padding"]
        assert how["dilation"] == [1, 1]
        (top, left), (down, right) = how["pre_padding"], how["stride"]
        return [
            (p, q, lambda dim, p=p, q=q: _part(dim, p - top, q - left, down, right))
            for p in range(filters[2])
            for q in range(filters[3])
        ]

    def conv_fprop(self, *, image: Tensor, weight: Tensor, **how: Any) -> Tensor:
        n, _, *lengths = image.dim
        output = [
            (length + before + after - size) // step + 1
            for length, before, after, size, step in zip(
                lengths,
                how["pre_padding"],
                how["post_padding"],
                weight.dim[2:],
                how["stride"],
                strict=True,
            )
        ]
        dim, places = [n, weight.dim[0], *output], self._places(how, weight.dim)

        def values(given: dict[Any, np.ndarray]) -> np.ndarray:
            x, w, y = image.values(given), weight.values(given), np.zeros(dim)
            for p, q, part in places:
                ours, theirs = part([*image.dim[2:], *output])
                y[ours] += np.einsum("nchw,kc->nkhw", x[theirs], w[:, :, p, q])
            return y

        return self._derived(dim, values)

    def conv_dgrad(self, *, loss: Tensor, filter: Tensor, **how: Any) -> Tensor:
        places = self._places(how, filter.dim)

        def values(given: dict[Any, np.ndarray]) -> np.ndarray:
            dy, w, dx = loss.values(given), filter.values(given), np.zeros(result.dim)
            for p, q, part in places:
                ours, theirs = part([*dx.shape[2:], *dy.shape[2:]])
                dx[theirs] += np.einsum("nkhw,kc->nchw", dy[ours], w[:, :, p, q])
            return dx

        result = self._derived(None, values)
        return result

    def conv_wgrad(self, *, image: Tensor, loss: Tensor, **how: Any) -> Tensor:
        def values(given: dict[Any, np.ndarray]) -> np.ndarray:
            x, dy, dw = image.values(given), loss.values(given), np.zeros(result.dim)
            for p, q, part in self._places(how, result.dim):
                ours, theirs = part([*x.shape[2:], *dy.shape[2:]])
                dw[:, :, p, q] = np.einsum("nkhw,nchw->kc", dy[ours], x[theirs])
            return dw

        result = self._derived(None, values)
        self._places(how, [0, 0, 0, 0])
        return result

    def bias(self, *, input: Tensor, bias: Tensor) -> Tensor:
        assert bias.dim == [1, input.dim[1], 1, 1]
        return self._derived(input.dim, lambda given: input.values(given) + bias.values(given))

    def relu(self, *, input: Tensor) -> Tensor:
        return self._derived(input.dim, lambda given: np.maximum(input.values(given), 0))

    def validate(self) -> None:
        self.stages = ["validate"]

    def build_operation_graph(self) -> None:
        self._reach("build_operation_graph", "validate")

    def create_execution_plans(self, heuristics: list[str]) -> None:
        self._reach("create_execution_plans", "build_operation_graph")

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        assert self.stages[-1] == "create_execution_plans", "there is nothing yet to leave out"
        self.barred += notes

    def select_numeric_notes(self, notes: list[str]) -> None:
        assert self.stages[-1] == "create_execution_plans", "there is nothing yet to choose"
        self.wanted += notes

    def check_support(self) -> None:
        self._reach("check_support", "create_execution_plans")
        if "STRICT_NAN_PROP" in self.wanted and not self._cudnn.strict:
            raise NotSupported("NaN may become a number")
        if self._uneven and self._cudnn.symmetric:
            raise NotSupported("padding differs from side to side")

    def build_plans(self) -> None:
        self._reach("build_plans", "check_support")
        self._cudnn.made.append(self)

    def _reach(self, stage: str, after: str) -> None:
        assert self.stages[-1] == after
        self.stages.append(stage)

    def get_workspace_size(self) -> int:
        return WORKSPACE

    def execute(self, places: dict[Tensor, int], workspace: int, handle: Handle) -> None:
        assert self in self._cudnn.made and handle is self.handle
        (out,) = self._out
        views = {tensor: tensor.view(address) for tensor, address in places.items()}
        scratch = at(workspace, WORKSPACE)

        def do() -> None:
            given = {t: np.asarray(v, np.float64) for t, v in views.items() if t is not out}
            scratch[:] = 0xFF
            views[out][...] = out.values(given)

        self._cupy.gpu.give(self._cupy.streams[handle.stream].queue, "convolution", do)


def cudnn(cupy: Any) -> Any:
    module: Any = types.ModuleType("cudnn")
    module.made = []  # graphs that have been built
    module.symmetric = False  # whether padding must be the same on both sides
    module.strict = True  # whether there are plans in which NaN stays NaN
    kinds = {"FLOAT": "float32", "HALF": "float16", "BFLOAT16": "bfloat16"}
    notes = "NONDETERMINISTIC REDUCED_PRECISION_REDUCTION TENSOR_CORE DOWN_CONVERT_INPUTS"
    notes += " STRICT_NAN_PROP"
    module.data_type = types.SimpleNamespace(**kinds)
    module.numerical_note = types.SimpleNamespace(**{note: note for note in notes.split()})
    module.heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    module.cudnnGraphNotSupportedError = NotSupported
    module.pygraph = type("pygraph", (pygraph,), {"_cudnn": module, "_cupy": cupy})
    module.set_stream = set_stream
    module.create_handle, module.destroy_handle = Handle, lambda handle: None
    module.backend_version = lambda: 92700
    return module


def _part(lengths: list[int], up: int, left: int, down: int, right: int) -> tuple[Any, Any]:
    """Return which windows have an element of the image at one of their places, and which it is.

    lengths: of the image, then of the result; the place is so far from the window's first element
    of the image without padding.
    """
    height, width, rows, columns = lengths
    i = [r for r in range(rows) if 0 <= r * down + up < height]
    j = [c for c in range(columns) if 0 <= c * right + left < width]
    ours = slice(None), slice(None), slice(*_ends(i)), slice(*_ends(j))
    theirs = (
        slice(None),
        slice(None),
        slice(i[0] * down + up, i[-1] * down + up + 1, down) if i else slice(0),
        slice(j[0] * right + left, j[-1] * right + left + 1, right) if j else slice(0),
    )
    return ours, theirs


def _ends(numbers: list[int]) -> tuple[int, int]:
    return (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
