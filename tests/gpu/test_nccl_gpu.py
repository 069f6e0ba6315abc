"""NCCL itself, on a GPU: one rank, several on one GPU, one on each; and that launches are in order.

Values are whole numbers, whose sums are exact, so that they are right to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import REAL, cuda, gpus
from summing import on, out, same, sums, whole_numbers
from training import given, starts, train

import minidist as md
from minidist import comm
from minidist.comm import nccl_library
from minidist.comm.nccl_library import Nccl4py, OfCupy, load

pytestmark = pytest.mark.gpu
BIG = [(), (5,), (7, 11), (1 << 20,), (3, 1 << 18)]
EACH = f"cuda*{gpus()}" if gpus() else "cuda"
PLACES = ["cuda:0", "cuda:0*2", "cuda:0*4", EACH]


@pytest.fixture(autouse=True)
def real(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NCCL_LAUNCH_RACE_FATAL", "1")  # two launches that nothing orders
    with cuda(libraries, REAL):
        yield


@pytest.fixture(params=[Nccl4py, OfCupy])
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    load()  # sets the environment
    try:
        library = request.param()
    except ImportError as cause:
        pytest.skip(str(cause))
    monkeypatch.setattr("minidist.comm.nccl.load", lambda: library)
    return library


@pytest.mark.parametrize("spec", PLACES)
@pytest.mark.parametrize("dtype", sorted(nccl_library.TYPES))
def test_sums(binding: Any, spec: str, dtype: str) -> None:
    devices = md.devices(spec)
    n = len(devices)
    one = comm.make("nccl", devices)
    floats = dtype.startswith(("float", "bfloat"))
    weights = [float(k % 3) for k in range(1, n + 1)] if floats else None
    for round_ in range(5):
        rows = whole_numbers(n, dtype, BIG, round_)
        sources, wanted = on(devices, rows), on(devices, rows)
        one.all_reduce(sources, wanted, weights, scale=0.5 if floats else 1.0, threads=1)
        for device, row, source, was in zip(devices, wanted, sources, rows, strict=True):
            same(out(device, row), sums(rows, weights, 0.5 if floats else 1.0))
            same(out(device, source), was)
    one.close()


@pytest.mark.parametrize("spec", PLACES)
def test_everything_else(binding: Any, spec: str) -> None:
    devices = md.devices(spec)
    n = len(devices)
    one = comm.make("nccl", devices)
    rows = whole_numbers(n, "float32", BIG)
    for root, device in enumerate(devices):
        row = on([device], rows[:1])[0]
        one.reduce(on(devices, rows), row, root=root, threads=1)
        same(out(device, row), sums(rows))
        sent = on(devices, rows)
        one.broadcast(sent, root)
        for other, got in zip(devices, sent, strict=True):
            same(out(other, got), rows[root])
    flat = whole_numbers(n, "float32", [(1000 * n,)])
    wanted = on(devices, [[np.zeros(1000, "float32")]] * n)
    one.reduce_scatter(on(devices, flat), wanted, threads=1)
    for k, (device, row) in enumerate(zip(devices, wanted, strict=True)):
        same(out(device, row), [sums(flat)[0][1000 * k : 1000 * (k + 1)]])
    one.close()


@pytest.mark.parametrize("spec", ["cuda:0*2", pytest.param("cuda*2", id="two GPUs")])
def test_a_training(spec: str) -> None:
    if spec == "cuda*2" and gpus() < 2:
        pytest.skip("needs 2 GPUs")
    shapes = [(3,), (7, 11), (3, 1, 4, 2)]
    want, _ = train("cpu*2", "replicated", given("nesterov"), starts(shapes))
    got, _ = train(spec, "replicated", given("nesterov"), starts(shapes), all_reduce_spec="nccl")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
