"""Convolutions by cuDNN: on a stand-in beside CuPy's, and the graphs that the real one takes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices import cuda
from training import of_images
from verbs import BOUND, CASES, Case, call, compare

import minidist as md
from minidist.device import get, kernel_choice
from minidist.device.ops import Window
from minidist.dtypes import as_dtype

VERBS = ["conv2d", "conv2d_backward_input", "conv2d_backward_filter"]
DTYPES = ["float32", "float16", "bfloat16"]
EVEN = Window((3, 3), (2, 2), (1, 1), (1, 1), (3, 3))  # of images 5 x 5
UNEVEN = Window((2, 3), (2, 1), (0, 1), (1, 1), (3, 5))


@pytest.fixture(params=range(2))
def both(request: pytest.FixtureRequest, libraries: Path) -> Iterator[Any]:
    """CuPy's stand-in and cuDNN's."""
    with cuda(libraries, request.param, dnn=True) as cupy:
        yield SimpleNamespace(cupy=cupy, cudnn=sys.modules["cudnn"])


def arguments(case: Case, verb: str, window: Window, n: int = 2) -> Any:
    kh, kw = window.size
    x, dy, w = case(n, 5, 5, 3), case(n, *window.output, 4), case(kh, kw, 3, 4)
    given = {
        "conv2d": [(x, w, window), (x, w, window, case(4), True), (x, w, window, case(4))],
        "conv2d_backward_input": [(dy, w, x.shape, window)],
        "conv2d_backward_filter": [(x, dy, w.shape, window)],
    }
    return given[verb]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_they_are_the_cpus(
    both: Any, verb: str, window: Window, dtype: str, symmetric: bool
) -> None:
    both.cudnn.symmetric = symmetric
    for ours, theirs in zip(
        arguments(Case(dtype), verb, window), arguments(Case(dtype), verb, window), strict=True
    ):
        compare(call(get("cuda:0"), verb, ours), call(get("cpu:0"), verb, theirs), BOUND[dtype])
    assert both.cudnn.made and "convolution" in both.cupy.gpu.calls
    assert "im2col" not in both.cupy.gpu.calls and "gemm" not in both.cupy.gpu.calls


@pytest.mark.parametrize("verb", VERBS)
def test_what_it_does_not_do_goes_through_columns(both: Any, verb: str) -> None:
    for dtype, n, windows in (("float64", 2, [EVEN]), ("float32", 0, [EVEN])):
        for window in windows:
            ours, theirs = (arguments(Case(dtype), verb, window, n)[0] for _ in range(2))
            compare(call(get("cuda:0"), verb, ours), call(get("cpu:0"), verb, theirs), 1e-13)
    point = CASES[verb](Case("float32"))[1]  # a matrix product, and nothing but that
    call(get("cuda:0"), verb, point)
    assert not both.cudnn.made and "gemm" in both.cupy.gpu.calls


def test_a_shape_that_it_declines_is_asked_for_once(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def declines(self: Any) -> None:
        asked.append(self)
        raise both.cudnn.cudnnGraphNotSupportedError("no engine")

    monkeypatch.setattr(both.cudnn.pygraph, "check_support", declines)
    ours, theirs = (arguments(Case("float32"), "conv2d", EVEN)[0] for _ in range(2))
    for _ in range(3):
        got = call(get("cuda:0"), "conv2d", ours)
    compare(got, call(get("cpu:0"), "conv2d", theirs), 1e-5)
    assert len(asked) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_arrays_may_lie_anywhere(both: Any, verb: str) -> None:
    """A part of an array of 5 x 5 x 3 elements begins where no vector does."""
    ours, theirs = (arguments(Case("float32"), verb, EVEN, 3)[-1] for _ in range(2))
    device, given = get("cuda:0"), []
    for value in ours:
        if isinstance(value, np.ndarray):
            room = device.allocate((value.size + 3,), "float32")
            device.copy(room[3:], value.reshape(-1))
            value = room[3:].reshape(value.shape)
            assert value.data.ptr % 16 == 12
        given.append(value)
    got = device.copy_out(getattr(device.ops, verb)(*given))
    compare(got, call(get("cpu:0"), verb, theirs)[0], BOUND["float32"])
    assert both.cudnn.made


def test_a_shape_is_planned_once_for_each_stream(both: Any) -> None:
    device = get("cuda:0")
    x, w = (device.copy_in(a) for a in arguments(Case("float32"), "conv2d", EVEN)[0][:2])
    results = [device.ops.conv2d(x, w, EVEN) for _ in range(3)]
    device.stream("copy").submit(lambda: results.append(device.ops.conv2d(x, w, EVEN)))
    assert len(both.cudnn.made) == 2
    for result in results[1:]:
        assert device.copy_out(result).tobytes() == device.copy_out(results[0]).tobytes()


@pytest.mark.parametrize("tf32", [False, True])
def test_plans_that_round_more_or_differ_from_run_to_run_are_left_out(
    both: Any, monkeypatch: pytest.MonkeyPatch, tf32: bool
) -> None:
    monkeypatch.setenv("CUPY_TF32", str(int(tf32)))
    for dtype in ("float32", "bfloat16"):
        call(get("cuda:0"), "conv2d", arguments(Case(dtype), "conv2d", EVEN)[0])
    float32, bfloat16 = (set(graph.barred) for graph in both.cudnn.made)
    assert {"NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION"} <= float32 & bfloat16
    assert ("TENSOR_CORE" in float32) != tf32 and "TENSOR_CORE" not in bfloat16


@pytest.mark.parametrize("strict", [False, True])
def test_a_relu_is_fused_only_where_nan_stays_nan(both: Any, strict: bool) -> None:
    both.cudnn.strict = strict
    ours = arguments(Case("float32"), "conv2d", EVEN)[1]
    ours[0][0, 0, 0, 0] = np.nan
    (got, _) = call(get("cuda:0"), "conv2d", ours)
    (want, _) = call(get("cpu:0"), "conv2d", ours)
    assert np.isnan(got).any()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert ("relu" in both.cupy.gpu.calls) != strict and "im2col" not in both.cupy.gpu.calls
    assert [graph.wanted for graph in both.cudnn.made] == [["STRICT_NAN_PROP"] if strict else []]


def test_gemm_wants_no_cudnn(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "name", lambda: "gemm")
    call(get("cuda:0"), "conv2d", arguments(Case("float32"), "conv2d", EVEN)[0])
    assert not both.cudnn.made


def test_a_training_with_it_and_without(libraries: Path) -> None:
    def layers() -> list[md.nn.Layer]:
        windows = [md.nn.Conv2D(4, 3, activation="relu"), md.nn.Conv2D(4, 3, strides=2)]
        return [*windows, md.nn.BatchNorm(), md.nn.Flatten()]

    want = of_images("cpu*2", layers)
    with cuda(libraries, 1, dnn=True) as cupy, md.check() as check:
        assert of_images("cuda:0*2", layers) == pytest.approx(want, rel=1e-4)
        assert "convolution" in cupy.gpu.calls
    assert not check.races


# --- the real one, which plans nothing without a GPU but looks at what it is given


PLANNING = ["validate", "build_operation_graph", "check_support", "build_plans"]


def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuDNN's frontend, which without cuDNN and a GPU takes graphs but plans none."""
    module = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    pytest.importorskip("cupy", reason="needs CuPy")
    handle = module.Handle(None) if hasattr(module, "Handle") else 1
    monkeypatch.setattr(module, "create_handle", lambda: handle)
    monkeypatch.setattr(module, "set_stream", lambda handle, stream: None)
    for name in PLANNING:
        assert hasattr(module.pygraph, name)
        monkeypatch.setattr(module.pygraph, name, lambda self: None)
    notes = ("deselect_numeric_notes", "select_numeric_notes")
    for name in ("create_execution_plans", *notes):
        assert hasattr(module.pygraph, name)
        monkeypatch.setattr(module.pygraph, name, lambda self, wanted: None)
    monkeypatch.setattr(module.pygraph, "get_workspace_size", lambda self: 0)
    return module


@pytest.mark.parametrize("window", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_one_takes_our_graphs(
    monkeypatch: pytest.MonkeyPatch, window: Window, dtype: str
) -> None:
    cudnn = real(monkeypatch)
    from minidist.device.cuda_dnn import Convolution, Convolutions

    by = Convolutions(cudnn, SimpleNamespace(raw=SimpleNamespace(ptr=16)))
    x, w, y = (2, 5, 5, 3), (*window.size, 3, 4), (2, *window.output, 4)
    of = Convolution("forward", x, w, window, as_dtype(dtype))
    graphs = [
        (of._replace(bias=of.dtype, relu=True), y, 4),
        (of._replace(direction="backward_input"), x, 3),
        (of._replace(direction="backward_filter"), (4, *w[:3]), 3),
    ]
    for work, shape, count in graphs:
        plan = by._plan(work)
        assert plan is not None and len(plan.tensors) == count
        n, height, width, channels = shape
        out = plan.tensors[-1]
        assert list(out.get_dim()) == [n, channels, height, width] and not out.get_is_virtual()
        assert list(out.get_stride()) == [height * width * channels, 1, width * channels, channels]


def test_names_of_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = real(monkeypatch)
    notes = "NONDETERMINISTIC REDUCED_PRECISION_REDUCTION TENSOR_CORE DOWN_CONVERT_INPUTS"
    assert {*notes.split(), "STRICT_NAN_PROP"} <= set(cudnn.numerical_note.__members__)
    assert {"A", "FALLBACK"} <= set(cudnn.heur_mode.__members__)
    execute = list(inspect.signature(cudnn.pygraph.execute).parameters)
    assert execute[2:4] == ["workspace", "handle"]
    assert {"cudnnGraphNotSupportedError", "destroy_handle", "backend_version"} <= set(vars(cudnn))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    from minidist.device import cuda_dnn

    def without() -> int:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    for module, cure in (
        (None, "pip install nvidia-cudnn-frontend"),
        (SimpleNamespace(backend_version=without), "pip install nvidia-cudnn-cu12"),
    ):
        monkeypatch.setitem(sys.modules, "cudnn", module)
        cuda_dnn.cudnn.cache_clear()
        with pytest.raises(ImportError, match=cure):
            cuda_dnn.cudnn()
        assert cuda_dnn.convolutions(SimpleNamespace()) is None
    cuda_dnn.cudnn.cache_clear()
