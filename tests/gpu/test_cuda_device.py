"""CUDA devices on the stand-in: names, copies, who waits for whom, memory that is used again."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import cuda, need

import minidist as md
from minidist.device import get, host
from minidist.device.lease import Loan
from minidist.errors import HangError, UsageError

N = 1000


def ramp(n: int = N, dtype: str = "float32") -> np.ndarray:
    return np.arange(n).astype(dtype)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("cuda", ["cuda:0"]),
        ("cuda:0,1", ["cuda:0", "cuda:1"]),
        ("cuda*2", ["cuda:0", "cuda:1"]),
        ("cuda:1*3", ["cuda:1.0", "cuda:1.1", "cuda:1.2"]),
        ("cuda:0.1,cuda:1", ["cuda:0.1", "cuda:1"]),
    ],
)
def test_a_star_behind_an_index_shares_a_gpu(libraries: Path, spec: str, names: list[str]) -> None:
    with cuda(libraries, 0):
        devices = md.devices(spec)
        assert [device.short for device in devices] == names
        assert [get(device.name) for device in devices] == devices
        assert {device.name for device in devices} == {
            f"/job:worker/task:0/device:CUDA:{name.removeprefix('cuda:')}" for name in names
        }


def test_what_cannot_be_used_says_what_to_do(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda(libraries, 0) as cupy:
        with pytest.raises(
            UsageError, match=r"no cuda:2 in this machine, which has cuda:0, cuda:1"
        ):
            get("cuda:2")
        with monkeypatch.context() as changed:
            changed.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
            with pytest.raises(UsageError, match="unset it"):
                get("cuda:0")

        def no_driver() -> int:
            raise cupy.cuda.runtime.CUDARuntimeError("the driver is too old")

        cupy.cuda.runtime.getDeviceCount = no_driver
        with pytest.raises(UsageError, match="driver is too old; install NVIDIA's driver"):
            get("cuda:0")
        with monkeypatch.context() as changed:
            changed.setitem(sys.modules, "cupy", None)
            with pytest.raises(UsageError, match="pip install 'minidist"):
                get("cuda:0")
    with pytest.raises(UsageError, match="only a GPU has shares"):
        get("cpu:0.1")


# --- copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 11)])
def test_what_is_copied_in_comes_out(cupy: Any, shape: tuple[int, ...], dtype: str) -> None:
    device = get("cuda:0")
    values = np.arange(np.prod(shape)).reshape(shape).astype(md.dtypes.as_dtype(dtype))
    array = device.copy_in(values)
    out = device.copy_out(array)
    assert out.dtype == values.dtype and out.shape == shape and out.tobytes() == values.tobytes()
    view = device.ops.host_view(array)
    assert view.tobytes() == values.tobytes() and not view.flags.writeable


def test_what_was_copied_in_may_change_at_once(cupy: Any) -> None:
    device, values = get("cuda:0"), ramp()
    arrays = []
    for _ in range(10):
        arrays.append(device.copy_in(values))
        values += 1
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(device.copy_out(array), ramp() + i)


@pytest.mark.parametrize("spec", ["cuda:0*2", "cuda*2"])
def test_copies_between_devices_and_into_a_part_of_an_array(cupy: Any, spec: str) -> None:
    need(cupy, 2 if spec == "cuda*2" else 1)
    here, there = md.devices(spec)
    source = there.ops.add(there.copy_in(ramp()), there.copy_in(ramp()))
    copy = here.allocate((N,), "float32")
    here.copy(copy, source)
    columns = here.ops.full((N, 3), 7.0, "float32")
    here.copy(columns[:, 1], source)
    there.ops.fill(source, -1)  # after what still reads it
    np.testing.assert_array_equal(here.copy_out(copy), 2 * ramp())
    np.testing.assert_array_equal(here.copy_out(columns)[:, 1], 2 * ramp())
    assert (here.copy_out(columns)[:, ::2] == 7).all()
    on_host = host().allocate((N,), "float32")
    host().copy(on_host, source)
    assert (on_host == -1).all()


def test_big_endian_numbers_are_no_other_numbers(cupy: Any) -> None:
    device = get("cuda:0")
    array = device.allocate((N,), ">f4")
    device.copy(array, ramp().astype(">f4"))
    np.testing.assert_array_equal(device.copy_out(array), ramp())


# --- streams ------------------------------------------------------------------------------------


def test_a_stream_sees_what_another_one_has_written_and_not_the_reverse(standin: Any) -> None:
    device = get("cuda:0")
    copy = device.stream("copy")
    array = device.copy_in(ramp())
    for i in range(5):  # to and fro
        copy.submit(lambda: device.ops.accumulate(array, array))
        device.ops.accumulate(array, device.ops.full((N,), i, "float32"))
    expected = ramp()
    for i in range(5):
        expected = 2 * expected + i
    np.testing.assert_array_equal(device.copy_out(array), expected)
    device.synchronize()
    assert standin.gpu.calls.count("wait") <= 2 * 5 + 1


def test_streams_that_share_nothing_do_not_wait_for_each_other(standin: Any) -> None:
    devices = md.devices("cuda:0*3")
    arrays = [device.copy_in(ramp()) for device in devices]
    for device, array in zip(devices, arrays, strict=True):
        device.stream("communication").submit(lambda d=device, a=array: d.ops.accumulate(a, a))
    before = standin.gpu.calls.count("wait")
    for _ in range(10):
        for device in devices:
            device.ops.exp(device.ops.full((N,), 0.0, "float32"))
    assert standin.gpu.calls.count("wait") == before


def test_what_is_written_in_a_piece_that_is_still_being_given_is_waited_for(cupy: Any) -> None:
    """As where one thread takes a constant from the cache into which another has just put it."""
    device = get("cuda:0")
    other = device.stream("copy")
    array = device.copy_in(ramp())
    with device.giving() as stream:
        other.wait(stream.record())
        for i in range(5):
            device.ops.fill(array, i)
            copies: list[Any] = []
            other.submit(lambda copies=copies: copies.append(device.ops.copy(array)))
            assert (device.copy_out(copies[0]) == i).all()


def test_an_event_is_what_was_given_before_it(standin: Any) -> None:
    device = get("cuda:0")
    stream = device.stream("compute")
    array = device.copy_in(ramp())
    for _ in range(20):
        device.ops.accumulate(array, array)
    event = stream.record()
    other = device.stream("copy")
    other.wait(event)
    other.wait(event)
    assert standin.gpu.calls.count("wait") == 1
    event.wait()
    assert event.done()
    other.record().wait()


def test_a_stream_of_a_gpu_and_one_with_a_thread_wait_for_each_other(cupy: Any) -> None:
    device, cpu = get("cuda:0"), get("cpu:5")
    values, gate = ramp(), threading.Event()
    thread = cpu.stream("copy")

    def change() -> None:
        gate.wait()
        values[...] = 3

    thread.submit(change)
    gate.set()
    device.stream("copy").wait(thread.record())
    array = device.copy_in(values)
    result = np.empty(N, np.float32)
    thread.wait(device.stream("compute").record())
    thread.submit(lambda: cpu.copy(result, array))
    thread.synchronize()
    assert (result == 3).all()
    cpu.close()


def test_who_waits_too_long_hears_of_it(standin: Any) -> None:
    device = get("cuda:0")
    device.copy_in(ramp())
    event = device.stream("compute").record()
    step, standin.gpu.step = standin.gpu.step, lambda: None
    with pytest.raises(HangError, match="compute stream of cuda:0 did not finish"):
        event.wait(0.01)
    standin.gpu.step = step


def test_cuda_events_are_used_again_when_nobody_can_wait_for_them(cupy: Any) -> None:
    device = get("cuda:0")
    stream, other = device.stream("compute"), device.stream("copy")
    made = set()
    for _ in range(50):
        event = stream.record()
        made.add(id(event.raw))
        other.wait(event)
        del event
        device.copy_out(device.copy_in(ramp()))
    assert len(made) <= 30


def test_after_a_fork_there_is_no_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = get("cuda:0")
    monkeypatch.setattr("os.getpid", lambda: -1)
    device.renew()
    with pytest.raises(md.errors.ForkError, match="does not survive a fork"):
        device.allocate((1,), "float32")


# --- memory -------------------------------------------------------------------------------------


def test_a_dropped_array_is_not_used_again_while_another_stream_reads_it(cupy: Any) -> None:
    device = get("cuda:0")
    total = device.ops.full((N,), 0.0, "float32")
    add = device.stream("communication")
    for i in range(20):
        array = device.ops.full((N,), i, "float32")
        add.submit(partial(device.ops.accumulate, total, array))
        del array  # its memory is free for the next one, once it has been read
    assert (device.copy_out(total) == sum(range(20))).all()


def test_leased_buffers_are_ordered_too(cupy: Any) -> None:
    one, two = md.devices("cuda:0*2")
    total = two.ops.full((N,), 0.0, "float32")
    for i in range(10):
        lease = one.lease((N,), "float32")
        one.ops.fill(lease.array, i)
        two.ops.accumulate(total, lease.array)
        lease.release()
    assert (two.copy_out(total) == sum(range(10))).all()


def test_a_tied_view_keeps_its_owner(cupy: Any) -> None:
    device = get("cuda:0")
    loan = Loan(device.lease((N,), "float32"))
    whole = loan.array(device)
    device.ops.fill(whole, 2)
    part = whole[10:20].reshape(2, 5)
    gone = weakref.ref(loan)
    del loan, whole
    gc.collect()
    assert gone() is not None
    assert (device.copy_out(part) == 2).all()
    del part
    gc.collect()
    assert gone() is None


def test_steps_after_the_second_make_no_memory(cupy: Any) -> None:
    device = get("cuda:0")
    x, w = ramp(60).reshape(6, 10), device.copy_in(ramp(40).reshape(10, 4))
    area = md.StagingArea(["float32"], device=device)
    made = []
    for _ in range(12):
        area.put([x])
        (batch,) = area.get()
        y = device.ops.relu(device.ops.matmul(batch.array, w))
        device.ops.sgd([w], [w], lr=0.1, scale=1.0, weight_decay=[0.0], threads=1)
        device.copy_out(y)
        del batch, y
        made.append((device.memory.made, device.pinned.made))
    assert made[5:] == made[5:6] * 7


# --- arrays that are elsewhere ------------------------------------------------------------------


@pytest.mark.parametrize("peers", [True, False])
def test_sums_over_all_kinds_of_memory(standin: Any, peers: bool) -> None:
    standin.cuda.runtime.deviceCanAccessPeer = lambda gpu, peer: peers
    homes = [*md.devices("cuda*2"), host(), get("cpu:0")]
    for adder in homes:
        sources = [[home.copy_in(ramp() * (i + 1))] for i, home in enumerate(homes)]
        results = [[home.copy_in(ramp() * 0)] for home in homes]
        adder.ops.sum(results, sources, scale=0.5, threads=1)
        for home, (result,) in zip(homes, results, strict=True):
            np.testing.assert_array_equal(home.copy_out(result), ramp() * 5)


def test_any_verb_takes_arrays_from_elsewhere(cupy: Any) -> None:
    need(cupy, 2)
    here, there = md.devices("cuda*2")
    array = there.copy_in(ramp())
    here.ops.accumulate(array, ramp())
    np.testing.assert_array_equal(there.copy_out(array), 2 * ramp())
    np.testing.assert_array_equal(here.copy_out(here.ops.add(array, ramp())), 3 * ramp())
