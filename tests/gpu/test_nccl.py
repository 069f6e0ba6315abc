"""NCCL on the stand-in: sums and rows on several GPUs, on shares of one, and by either binding."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import cuda
from heard import Heard
from summing import OLD, SHAPES, on, out, same, sums, whole_numbers, world

import minidist as md
from minidist import comm, observe
from minidist.comm import nccl_library
from minidist.comm.row import placed
from minidist.device import host
from minidist.errors import ShapeError, UsageError
from minidist.traffic import Outline

FEW = ["cuda:0", "cuda*2", "cuda:0*3", "cuda:0.0,cuda:1.0,cuda:0.1"]


@pytest.mark.parametrize("version", [23203, OLD])
@pytest.mark.parametrize("spec", FEW)
@pytest.mark.parametrize("binding", ["nccl4py", "cupy"])
def test_a_sum_for_everybody(libraries: Path, binding: str, spec: str, version: int) -> None:
    for seed in range(3):
        with world(libraries, seed, binding=binding, version=version) as there:
            devices = md.devices(spec)
            one = comm.make("nccl", devices)
            for dtype in ("float32", "bfloat16", "int64"):
                rows = whole_numbers(len(devices), dtype, seed=seed)
                sources = on(devices, rows)
                wanted = on(devices, whole_numbers(len(devices), dtype, seed=9))
                one.all_reduce(sources, wanted, threads=1)
                for device, row, source, was in zip(devices, wanted, sources, rows, strict=True):
                    same(out(device, row), sums(rows))
                    same(out(device, source), was)
            one.close()
            one.close()
            assert there.live == 0


KINDS = ["float32", "float64", "float16", "bfloat16"]
WEIGHTS = [(None, 0.25), (None, 1 / 2), ([2.0, 0.0, 4.0, 1.0], 0.5), ([0.0, 0.0, 0.0, 1.0], 1.0)]


@pytest.mark.parametrize("version", [23203, OLD])
@pytest.mark.parametrize(("weights", "scale"), WEIGHTS)
@pytest.mark.parametrize("spec", ["cuda:0*4", "cuda:0.0,cuda:1.0,cuda:0.1,cuda:1.1"])
def test_weights_and_means(
    libraries: Path, spec: str, weights: Any, scale: float, version: int
) -> None:
    with world(libraries, 1, version=version):
        devices = md.devices(spec)
        one = comm.make("nccl", devices)
        for dtype in KINDS:
            rows = whole_numbers(4, dtype)
            sources = on(devices, rows)
            if weights is not None:
                sources[1] = on(devices[1:2], [[np.full_like(x, np.nan) for x in rows[1]]])[0]
            one.all_reduce(sources, sources, weights, scale=scale, threads=1)  # in place
            for device, row in zip(devices, sources, strict=True):
                same(out(device, row), sums(rows, weights, scale))
        one.close()


@pytest.mark.parametrize("spec", ["copy:20:nccl", "nccl:20:copy", "nccl:0:nccl"])
def test_tensors_of_other_sizes_may_go_another_way(libraries: Path, spec: str) -> None:
    weights = [2.0, 0.0, 4.0]
    with world(libraries, 1) as there:
        devices = md.devices("cuda:0.0,cuda:1.0,cuda:0.1")
        one = comm.make(spec, devices)
        rows = whole_numbers(3, "float32")
        wanted = on(devices, rows)
        one.all_reduce(on(devices, rows), wanted, weights, scale=0.5, threads=1)
        for device, row in zip(devices, wanted, strict=True):
            same(out(device, row), sums(rows, weights, 0.5))
        one.close()
        assert there.handles and there.live == 0


def test_a_mean_of_three_is_the_sum_times_a_third(libraries: Path) -> None:
    with world(libraries):
        devices = md.devices("cuda:0*3")
        one = comm.make("nccl", devices)
        rows = whole_numbers(3, "float32")
        wanted = on(devices, rows)
        one.all_reduce(on(devices, rows), wanted, scale=1 / 3, threads=1)
        same(out(devices[2], wanted[2]), [x * np.float32(1 / 3) for x in sums(rows)])
        one.close()


def test_a_mean_of_a_power_of_two_takes_one_pass_and_never_overflows(libraries: Path) -> None:
    with world(libraries) as there:
        devices = md.devices("cuda*2")
        one = comm.make("nccl", devices)
        rows = [[np.full(5, 60000, "float16")], [np.full(5, 49984, "float16")]]
        sources = on(devices, rows)
        before = len(there.gpu.calls)
        one.all_reduce(sources, sources, scale=1 / 2, threads=1)
        given = there.gpu.calls[before:]
        assert set(given) <= {"all_reduce", "record", "wait"} and given.count("all_reduce") == 4
        same(out(devices[1], sources[1]), [np.full(5, 54992, "float16")])
        one.close()


@pytest.mark.parametrize("packing", [{"gradient_repacking": 3}, {"agg_small_grads_max_bytes": 99}])
def test_packed_or_not(libraries: Path, packing: dict[str, int]) -> None:
    with world(libraries, 2):
        devices = md.devices("cuda*2")
        one = comm.make("nccl", devices, comm.packer(**packing))
        rows = whole_numbers(2, "float32")
        wanted = on(devices, rows)
        one.all_reduce(on(devices, rows), wanted, scale=0.5, threads=1)
        for device, row in zip(devices, wanted, strict=True):
            same(out(device, row), sums(rows, None, 0.5))
        one.close()


@pytest.mark.parametrize("version", [23203, OLD])
@pytest.mark.parametrize("spec", FEW)
def test_a_sum_for_one_replica_or_the_host(libraries: Path, spec: str, version: int) -> None:
    with world(libraries, 1, version=version):
        devices = md.devices(spec)
        one = comm.make("nccl", devices)
        rows = whole_numbers(len(devices), "float32")
        for root, device in enumerate(devices):
            sources = on(devices, rows)
            row = on([device], rows[:1])[0]
            one.reduce(sources, row, root=root, scale=0.5, threads=1)
            same(out(device, row), sums(rows, None, 0.5))
            for source, was, home in zip(sources, rows, devices, strict=True):
                same(out(home, source), was)
        at_home = [np.zeros_like(x) for x in rows[0]]
        one.reduce(on(devices, rows), comm.Row.on(host(), at_home), threads=1)
        same(at_home, sums(rows))
        spread = [devices[t % len(devices)] for t in range(len(SHAPES))]
        mixed = comm.Row([d.copy_in(x) for d, x in zip(spread, rows[0], strict=True)], spread)
        one.reduce(on(devices, rows), mixed, threads=1)
        same([d.copy_out(x) for d, x in zip(spread, mixed, strict=True)], sums(rows))
        one.close()


class Spans(observe.Observer):
    """What is begun, of which kind and by whom, with the numbers of rows."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> None:
        if kind == "reduce":
            self.found.append((name, about["sources"], about["destinations"]))


@pytest.mark.parametrize("spec", ["nccl", "copy"])
def test_a_sum_for_one_replica_is_in_a_trace_once(libraries: Path, spec: str) -> None:
    with world(libraries):
        devices = md.devices("cuda*2")
        one = comm.make(spec, devices)
        rows, heard = whole_numbers(2, "float32"), Spans()
        wanted = on(devices, rows)[1]
        with observe.attached(heard):
            one.reduce(on(devices, rows), wanted, root=1, threads=1)
        same(out(devices[1], wanted), sums(rows))
        assert heard.found == [(type(one).__name__, 2, 1)]
        one.close()


@pytest.mark.parametrize("size", [12, 13, 0])
@pytest.mark.parametrize("version", [23203, OLD])
def test_each_replica_gets_its_share(libraries: Path, size: int, version: int) -> None:
    with world(libraries, 3, version=version) as there:
        devices = md.devices("cuda:0.0,cuda:1.0,cuda:0.1")
        one = comm.make("nccl", devices)
        rows = whole_numbers(3, "float32", [(size,), (6,)])
        ends = [size * k // 3 for k in range(4)]
        shares = [[np.zeros(b - a, "float32"), np.zeros(2, "float32")] for a, b in pairwise(ends)]
        wanted = on(devices, shares)
        one.reduce_scatter(on(devices, rows), wanted, [1.0, 2.0, 0.0], scale=0.5, threads=1)
        total = sums(rows, [1.0, 2.0, 0.0], 0.5)
        for k, (device, row) in enumerate(zip(devices, wanted, strict=True)):
            same(out(device, row), [total[0][ends[k] : ends[k + 1]], total[1][2 * k : 2 * k + 2]])
        assert ("reduce_scatter" in there.gpu.calls) == (version != OLD and size != 13)
        one.close()


@pytest.mark.parametrize("version", [23203, OLD])
@pytest.mark.parametrize("spec", FEW)
def test_a_row_for_everybody(libraries: Path, spec: str, version: int) -> None:
    with world(libraries, 1, version=version):
        devices = md.devices(spec)
        one = comm.make("nccl", devices)
        for root in range(len(devices)):
            rows = [
                [*whole_numbers(1, "float32", seed=k)[0], np.arange(3) > k, np.arange(k, k + 3)]
                for k in range(len(devices))
            ]
            there = on(devices, rows)
            one.broadcast(there, root)
            for device, row in zip(devices, there, strict=True):
                same(out(device, row), rows[root])
        assert one.all_gather(there)[0] is not None
        one.close()


def test_what_nccl_cannot_add_up_is_named_before_anything_moves(libraries: Path) -> None:
    with world(libraries) as there:
        devices = md.devices("cuda*2")
        one = comm.make("nccl", devices)
        before = list(there.gpu.calls)
        rows = [[np.ones(3, "int16")], [np.ones(3, "int16")]]
        with pytest.raises(
            ShapeError, match=r"NCCL cannot add up int16; convert it with ops\.cast"
        ):
            one.all_reduce(rows, rows, threads=1)
        with pytest.raises(ShapeError, match="bool cannot be added up"):
            one.all_reduce([[np.ones(3, bool)]] * 2, [[np.ones(3, bool)]] * 2, threads=1)
        with pytest.raises(ShapeError, match="tensor 0 is float32"):
            one.reduce(
                [[np.ones(3, "f4")], [np.ones(4, "f4")]], [np.ones(3, "f4")], root=0, threads=1
            )
        assert there.gpu.calls == before
        one.close()


def test_bytes_are_as_predicted(libraries: Path) -> None:
    for version in (23203, OLD):
        with world(libraries, version=version):
            devices = md.devices("cuda:0.0,cuda:1.0,cuda:0.1")
            one = comm.make("nccl", devices)
            rows = whole_numbers(3, "float32")
            sources, wanted = on(devices, rows), on(devices, rows)
            outlines = [Outline.of(array) for array in rows[0]]
            for some in (wanted, wanted[:1], wanted[1:]):
                places = [row.devices for row in placed(some, devices)]
                heard = Heard()
                with observe.attached(heard):
                    one.all_reduce(
                        sources,
                        [comm.Row(*both) for both in zip(some, places, strict=True)],
                        threads=1,
                    )
                assert heard.links == one.predicted_bytes(outlines, places)
            one.close()


# --- without GPUs, or NCCL ----------------------------------------------------------------------


def test_it_is_for_gpus(libraries: Path) -> None:
    with pytest.raises(UsageError, match="nccl sums on GPUs, and cpu:0 is none; use auto"):
        comm.make("nccl", md.devices("cpu*2"))
    with pytest.raises(UsageError, match="cpu:1 is none"), world(libraries):
        comm.make("nccl", md.devices("cuda:0,cpu:1"))


def test_without_nccl_it_says_what_to_install(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda(libraries, 0):
        for name in ("nccl", "nccl.bindings", "nccl.bindings.nccl", "cupy.cuda"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            UsageError, match=r"nccl needs NCCL, which cannot be loaded .*pip install"
        ):
            comm.make("nccl", md.devices("cuda*2"))


def test_ranks_share_a_gpu_unless_that_is_switched_off(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, ranks in ((None, 4), ("0", 1)):
        monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
        if setting is not None:
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
        with world(libraries) as there:
            one = comm.make("nccl", md.devices("cuda:0*4"))
            assert len(there.handles) == ranks
            one.close()


@pytest.mark.parametrize(("order", "ranks"), [(None, 2), ("0", 8)])
def test_ranks_share_no_gpu_whose_driver_runs_their_kernels_one_after_the_other(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, order: str | None, ranks: int
) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if order is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", order)
    with world(libraries) as there:
        monkeypatch.setattr(there.cupy.cuda.runtime, "driverGetVersion", lambda: 12020)
        devices = md.devices(",".join(f"cuda:{gpu}.{k}" for gpu in range(2) for k in range(4)))
        one = comm.make("nccl", devices)
        assert len(there.handles) == ranks
        rows = whole_numbers(8, "float32")
        wanted = on(devices, rows)
        one.all_reduce(on(devices, rows), wanted, threads=1)
        for device, row in zip(devices, wanted, strict=True):
            same(out(device, row), sums(rows))
        one.close()


@pytest.mark.parametrize(("spec", "each"), [("cuda:0*4", 8), ("cuda*2", 32), ("cuda:0*3", 10)])
def test_ranks_of_one_gpu_take_no_more_blocks_than_can_run(
    libraries: Path, spec: str, each: int
) -> None:
    """All of them at once, as they wait for each other; the stand-in refuses more."""
    with world(libraries) as there:
        one = comm.make("nccl", md.devices(spec))
        assert {handle.blocks for handle in there.handles} == {each}
        one.close()


def test_nccl_finds_its_settings_and_keeps_those_of_others(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in nccl_library.SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with world(libraries):
        nccl_library.load()
        assert {name: os.environ[name] for name in nccl_library.SETTINGS} == {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
            "NCCL_RUNTIME_CONNECT": "0",
        }
        monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
        nccl_library.load()
        assert os.environ["NCCL_RUNTIME_CONNECT"] == "1"
