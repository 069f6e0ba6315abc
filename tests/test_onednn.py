"""All implementations of convolutions and products give the same; what happens without oneDNN."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from convolutions import Case, case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import threads
from minidist.device import cpu_linear, cpu_onednn
from minidist.device.cpu_work import Convolution, Product
from minidist.device.ops import Window
from minidist.dtypes import as_dtype
from minidist.errors import UsageError

needs_onednn = pytest.mark.skipif(cpu_onednn.find() is None, reason=cpu_onednn.why_not())
FLOAT = np.dtype(np.float32)
POINTWISE = Window((1, 1), (1, 1), (0, 0), (0, 0), (6, 6))
STRIDED = Window((1, 1), (2, 2), (0, 0), (0, 0), (3, 3))
LARGE = Window((5, 5), (1, 1), (2, 2), (2, 2), (28, 28))
CHOSEN = [
    (4, (28, 28), 1, 32, LARGE),
    (2, (6, 6), 32, 64, POINTWISE),
    (2, (6, 6), 32, 64, STRIDED),
    (2, (6, 6), 32, 64, Window((3, 3), (2, 2), (1, 1), (0, 0), (3, 3))),
]


def ways_agree(of: Case) -> set[str]:
    """Check every implementation of every direction; return their names."""
    names: set[str] = set()
    for direction, a, b, wanted in (
        ("forward", of.x, of.w, of.y()),
        ("backward_input", of.dy, of.w, of.dx()),
        ("backward_filter", of.x, of.dy, of.dw()),
    ):
        work = Convolution(direction, of.x.shape, of.w.shape, of.window, FLOAT, 1)
        for name, run in work.ways():
            out = np.full_like(wanted, 7)
            run(a, b, out)
            np.testing.assert_array_equal(out, wanted, f"{name} {work.name}")
            names.add(name)
    return names


@given(cases(st.integers(1, 17)))
@settings(max_examples=60, deadline=None)
def test_all_ways_of_a_convolution_give_the_same(of: Case) -> None:
    if of.x.size and of.dy.size:
        ways_agree(of)


@needs_onednn
@pytest.mark.parametrize("kind", CHOSEN)
def test_all_ways_are_there_where_it_matters(kind) -> None:
    assert ways_agree(case(*kind)) - {"tiles"} == {"gemm", "direct", "onednn", "onednn-any"}


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 5, 7), (64, 33, 10), (16, 64, 128)])
def test_all_ways_of_a_product_give_the_same(n, k, m, transpose_a, transpose_b) -> None:
    whole = np.random.default_rng(0)
    a, b = (whole.integers(-4, 5, shape).astype(FLOAT) for shape in ((n, k), (k, m)))
    wanted = np.einsum("nk,km->nm", a, b)
    a, b = (
        np.ascontiguousarray(each.T) if turned else each
        for each, turned in ((a, transpose_a), (b, transpose_b))
    )
    work = Product(a.shape, b.shape, transpose_a, transpose_b, FLOAT, 1)
    for name, run in work.ways():
        c = np.full_like(wanted, 7)
        run(a, b, c)
        np.testing.assert_array_equal(c, wanted, name)


def test_bfloat16_is_rounded_once_whichever_way_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(threads, "per_replica", lambda: 1)
    dtype = as_dtype("bfloat16")
    of = case(8, *CHOSEN[3][1:])  # enough to be worth a choice
    x, w, dy = (each.astype(dtype) for each in of[:3])
    bias = np.arange(len(w[0, 0, 0]), dtype=FLOAT).astype(dtype)
    before = cpu_linear.kernels()
    try:
        for kernels in ("gemm", "onednn", "auto")[:: 1 if cpu_onednn.find() else 2]:
            cpu_linear.set_kernels(kernels)
            for given, wanted in (
                (cpu_linear.conv2d(x, w, of.window), of.y()),
                (cpu_linear.conv2d(x, w, of.window, bias), of.y() + bias.astype(FLOAT)),
                (cpu_linear.conv2d_backward_input(dy, w, x.shape, of.window), of.dx()),
                (cpu_linear.conv2d_backward_filter(x, dy, w.shape, of.window), of.dw()),
            ):
                np.testing.assert_array_equal(given, wanted.astype(dtype), kernels)
    finally:
        cpu_linear.set_kernels(before)


@pytest.mark.parametrize("kind", CHOSEN)
def test_all_ways_add_a_bias_and_keep_nan(kind) -> None:
    of = case(*kind)
    bias = np.arange(of.w.shape[3], dtype=FLOAT)
    bias[1] = np.nan
    shapes = (of.x.shape, of.w.shape)
    work = Convolution("forward", *shapes, of.window, FLOAT, 1, bias=True)
    assert work.name == work._replace(bias=False).name
    for name, run in work.ways():
        y = np.full_like(of.dy, 7)
        run(of.x, of.w, bias, y)
        np.testing.assert_array_equal(y, of.y() + bias, name)


@needs_onednn
def test_no_primitive_is_the_library_s_reference() -> None:
    for kind in CHOSEN:
        of = case(*kind)
        shapes = cpu_onednn.find().Convolution(
            of.x.shape,
            of.w.shape,
            of.dy.shape,
            of.window.strides,
            of.window.before,
            of.window.after,
            own_layout=False,
            narrow=False,
            has_bias=False,
            threads=1,
        )
        for primitive in (shapes.forward(), shapes.backward_input(), shapes.backward_filter()):
            assert primitive.implementation and not primitive.implementation.startswith("ref")


@needs_onednn
def test_a_primitive_refuses_what_does_not_fit() -> None:
    onednn = cpu_onednn.find()
    a, b, c = np.ones((4, 8), FLOAT), np.ones((8, 4), FLOAT), np.empty((4, 4), FLOAT)
    primitive = onednn.matmul(4, 8, 4, False, False, threads=1)
    primitive.run(a, b, c)
    assert (c == 8).all()
    with pytest.raises(TypeError, match="a must be a float32 array"):
        primitive.run(a.astype(np.float64), b, c)
    with pytest.raises(ValueError, match="b must have 128 bytes, got 64"):
        primitive.run(a, b[:4], c)
    with pytest.raises(ValueError, match="b must be C-contiguous"):
        primitive.run(a, b[::-1], c)
    c.flags.writeable = False
    with pytest.raises(ValueError, match="c must be C-contiguous and writeable"):
        primitive.run(a, b, c)
    with pytest.raises(TypeError, match="run needs 3 arrays, got 2"):
        primitive.run(a, b)
    with pytest.raises(ValueError, match="c must have"):
        onednn.sgemm(a, b, np.empty(3, FLOAT), 4, 8, 4, False, False, 1)


def looking_again(monkeypatch) -> None:
    monkeypatch.setattr(cpu_onednn, "_found", None)


def test_without_the_package(monkeypatch) -> None:
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    looking_again(monkeypatch)
    monkeypatch.setattr(cpu_onednn.metadata, "files", missing)
    assert cpu_onednn.find() is None
    assert cpu_onednn.why_not().startswith("onednn-cpu-gomp is not installed; pip install")
    assert ways_agree(case(*CHOSEN[0])) <= {"gemm", "direct"}
    with pytest.raises(UsageError, match="asked for, but onednn-cpu-gomp is not installed"):
        cpu_linear.set_kernels("onednn")


def test_with_a_broken_library(monkeypatch, tmp_path: Path) -> None:
    broken = tmp_path / cpu_onednn.LIBRARY
    broken.write_bytes(b"no library")
    file = SimpleNamespace(name=broken.name, locate=lambda: broken)
    looking_again(monkeypatch)
    monkeypatch.setattr(cpu_onednn.metadata, "files", lambda name: [file])
    assert cpu_onednn.find() is None
    assert "does not load" in cpu_onednn.why_not()
    assert "pip install --force-reinstall" in cpu_onednn.why_not()


def test_with_a_package_that_has_no_library(monkeypatch) -> None:
    looking_again(monkeypatch)
    monkeypatch.setattr(cpu_onednn.metadata, "files", lambda name: [])
    assert "has no libdnnl.so.3" in cpu_onednn.why_not()


def test_on_another_system(monkeypatch) -> None:
    looking_again(monkeypatch)
    monkeypatch.setattr(cpu_onednn.platform, "machine", lambda: "arm64")
    assert "for Linux on x86-64 only" in cpu_onednn.why_not()


def program(text: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BEGIN = """
import os, hashlib
import numpy as np
from minidist import threads
from minidist.device import cpu_linear, cpu_onednn
from minidist.device.ops import Window
window = Window((5, 5), (1, 1), (2, 2), (2, 2), (14, 14))
rng = np.random.default_rng(0)
x, w = rng.standard_normal((8, 14, 14, 32), "f"), rng.standard_normal((5, 5, 32, 64), "f")
def convolve():
    return hashlib.sha256(cpu_linear.conv2d(x, w, window).tobytes()).hexdigest()
"""


@needs_onednn
def test_on_a_processor_without_avx2() -> None:
    show = BEGIN + "print(convolve(), cpu_onednn.why_not(), *(by for _, by in cpu_linear.used()))"
    told = program(show, ONEDNN_MAX_CPU_ISA="SSE41")
    assert "this CPU has no AVX2" in told and told.split()[-1] == "gemm"


@needs_onednn
def test_the_same_program_has_the_same_bits_in_every_process() -> None:
    show = BEGIN + "threads.limit_blas(x, 64)\nprint(convolve(), sorted(cpu_linear.used()))"
    first = program(show)
    assert "conv2d forward float32" in first
    assert program(show) == first


@needs_onednn
def test_a_forked_child_computes_without_the_threads_that_it_lacks() -> None:
    assert "child" in program(
        BEGIN
        + """
threads.cores = lambda: 2
before = convolve()
assert {used for _, used in cpu_linear.used()} == {"onednn"}
child = os.fork()
if child == 0:
    convolve()
    assert cpu_onednn.find() is None and "forked" in cpu_onednn.why_not()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert convolve() == before
print("child went well")
"""
    )


@needs_onednn
@pytest.mark.parametrize(
    "forget",
    [
        "cpu_linear.set_kernels('onednn')",
        "cpu_linear.MOST = threads._per_replica = 1; cpu_linear.matmul(a[:1], a)",
    ],
)
def test_nor_does_it_hang_where_the_parent_has_forgotten_what_it_made(forget) -> None:
    assert "child" in program(
        BEGIN
        + f"""
import signal
threads.cores = lambda: 2
a = np.ones((512, 512), "f")
cpu_linear.matmul(a, a)
{forget}
threads._per_replica = None
child = os.fork()
if child == 0:
    signal.alarm(20)
    assert (cpu_linear.matmul(a, a) == 512).all()
    assert cpu_onednn.find() is None
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("child went well")
"""
    )


LEFT_BEHIND = """
import sys, threading
import numpy as np
from minidist.device import cpu_onednn

onednn, begun = cpu_onednn.find(), threading.Event()

def multiply(n, times, sgemm=onednn.sgemm):
    a, c = np.ones((n, n), "f4"), np.empty((n, n), "f4")
    for _ in times:
        sgemm(a, a, c, n=n, k=n, m=n, transpose_a=False, transpose_b=False, threads=1)
        begun.set()

class Last:
    def __del__(self, multiply=multiply, few=[0] * 5):
        multiply(1000, few)  # the other one asks for the GIL meanwhile

sys.modules["last"] = Last()
threading.Thread(target=multiply, args=(100, iter(int, 1)), daemon=True).start()
begun.wait()
"""


@needs_onednn
def test_a_daemon_thread_at_work_does_not_spoil_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
