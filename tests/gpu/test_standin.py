"""What CUDA and cuBLAS refuse, the stand-in refuses: mistakes about GPUs and types are noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import cuda
from verbs import DTYPES

import minidist as md
from minidist.device import get
from minidist.dtypes import as_array

N = 100


def copy_here() -> None:
    device = get("cuda:0")
    array = device.copy_in(np.ones(N, np.float32))
    device.copy(device.allocate((N,), "float32"), array)
    assert (device.copy_out(array) == 1).all()


def copy_from_a_peer() -> None:
    here, there = md.devices("cuda*2")
    array = here.allocate((N,), "float32")
    here.copy(array, there.copy_in(np.ones(N, np.float32)))
    assert (here.copy_out(array) == 1).all()


def sum_over_peers() -> None:
    here, there = md.devices("cuda*2")
    result = here.ops.full((N,), 0, "float32")
    sources = [[device.copy_in(np.ones(N, np.float32))] for device in (here, there)]
    here.ops.sum([[result]], sources, threads=1)
    assert (here.copy_out(result) == 2).all()


def multiply() -> None:
    device = get("cuda:0")
    for dtype in DTYPES:
        a, b = (device.copy_in(as_array(np.eye(3), dtype)) for _ in range(2))
        assert (device.copy_out(device.ops.matmul(a, b)) == np.eye(3)).all()


def another_kind_of_copy(cupy: Any) -> None:
    cupy.cuda.runtime.memcpyDeviceToDevice = cupy.cuda.runtime.memcpyHostToDevice


def out_for_in(cupy: Any) -> None:
    cupy.cuda.runtime.memcpyHostToDevice = cupy.cuda.runtime.memcpyDeviceToHost


def peers_the_other_way_round(cupy: Any) -> None:
    copy = cupy.cuda.runtime.memcpyPeerAsync
    cupy.cuda.runtime.memcpyPeerAsync = lambda to, a, at, b, *rest: copy(to, b, at, a, *rest)


def a_peer_copied_as_if_it_were_here(cupy: Any) -> None:
    from minidist.device.cuda import CudaDevice

    def move(self: Any, destination: Any, source: Any, stream: Any) -> None:
        places = destination.data.ptr, source.data.ptr, source.nbytes
        cupy.cuda.runtime.memcpyAsync(*places, 3, stream.raw.ptr)

    CudaDevice._move = move


def access_that_nobody_enables(cupy: Any) -> None:
    cupy.cuda.runtime.deviceEnablePeerAccess = lambda peer: None


def access_of_the_peer(cupy: Any) -> None:
    enable = cupy.cuda.runtime.deviceEnablePeerAccess

    def reverse(peer: int) -> None:
        here = cupy.here.gpu[-1]
        with cupy.cuda.Device(peer):
            enable(here)

    cupy.cuda.runtime.deviceEnablePeerAccess = reverse


def all_in_tf32(cupy: Any) -> None:
    from minidist.device import cuda_blas

    cuda_blas._IN_FLOAT32 = cuda_blas._IN_TF32


def none_in_float64(cupy: Any) -> None:
    from minidist.device import cuda_blas

    cuda_blas._IN_FLOAT64 = cuda_blas._IN_FLOAT32


MISTAKES = [
    (copy_here, another_kind_of_copy),
    (copy_here, out_for_in),
    (copy_from_a_peer, peers_the_other_way_round),
    (copy_from_a_peer, a_peer_copied_as_if_it_were_here),
    (sum_over_peers, access_that_nobody_enables),
    (sum_over_peers, access_of_the_peer),
    (multiply, all_in_tf32),
    (multiply, none_in_float64),
]


@pytest.mark.parametrize(("program", "mistake"), MISTAKES, ids=lambda case: case.__name__)
def test_it_refuses(
    libraries: Path, program: Callable[[], None], mistake: Callable[[Any], None]
) -> None:
    with cuda(libraries, 0):
        program()
    with cuda(libraries, 0) as cupy:
        get("cuda:0")
        mistake(cupy)
        with pytest.raises(AssertionError):
            program()
        cupy.gpu.drain()


def test_it_refuses_to_record_another_gpus_event(standin: Any) -> None:
    event, stream = standin.cuda.Event(disable_timing=True), get("cuda:1").stream("compute")
    with pytest.raises(AssertionError, match="another GPU's"):
        event.record(stream.raw)


@pytest.mark.parametrize("tf32", [False, True])
def test_only_float32_is_ever_rounded_to_tf32(
    standin: Any, monkeypatch: pytest.MonkeyPatch, tf32: bool
) -> None:
    monkeypatch.setenv("CUPY_TF32", str(int(tf32)))
    multiply()
    device = get("cuda:0")
    device.ops.dense(
        *(device.copy_in(as_array(np.ones(s), "float16")) for s in ((2, 3), (3, 2), 2))
    )
    assert standin.gpu.products == [
        ("float32", "float32", 77 if tf32 else 68),
        ("float64", "float64", 70),
        ("float16", "float16", 68),
        ("bfloat16", "bfloat16", 68),
        ("float16", "float32", 68),
    ]
