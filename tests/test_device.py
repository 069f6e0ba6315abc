"""Devices, streams, events and leases: names, order, and what a failure on a stream does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import minidist as md
from minidist.device import ALIGNMENT, get, host
from minidist.device.cpu import CpuDevice
from minidist.errors import HangError, UsageError


@pytest.fixture
def device():
    device = CpuDevice(7, "cpu:7")
    yield device
    device.close()


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "cpu:1",
        "CPU:1",
        "/cpu:1",
        "/device:CPU:1",
        "/job:worker/task:0/device:CPU:1",
        "device:CPU:1",
    ],
)
def test_names_of_one_device_are_the_same_device(name):
    assert get(name) is get("cpu:1")
    assert get(name).name == "/job:worker/task:0/device:CPU:1" and get(name).short == "cpu:1"


def test_the_host_is_a_device_of_its_own():
    assert get("host") is host() and host() is not get("cpu:0") and host().short == "host"


@pytest.mark.parametrize(
    "name", ["tpu:0", "/device:cpu:1", "cpu:x", "cpu:-1", "cpu:1:2", "1", "gpu"]
)
def test_a_name_that_no_device_has_is_an_error(name):
    with pytest.raises(UsageError, match="is no device here"):
        get(name)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("cpu", ["cpu:0"]),
        ("cpu:3", ["cpu:3"]),
        ("cpu*3", ["cpu:0", "cpu:1", "cpu:2"]),
        ("cpu:0,2", ["cpu:0", "cpu:2"]),
        (["cpu:1", "cpu:0"], ["cpu:1", "cpu:0"]),
        ("cpu:1,/device:CPU:2", ["cpu:1", "cpu:2"]),
    ],
)
def test_a_colon_is_an_index_and_a_star_a_count(spec, names):
    assert [device.short for device in md.devices(spec)] == names
    assert [device.short for device in md.devices(md.devices(spec))] == names


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cpu*0", "no devices"),
        (None, "names no devices"),
        (3, "names no devices"),
        ("", "no devices"),
        ([], "no devices"),
        ("cpu:1,1", "twice"),
        (["cpu:1", "/cpu:1"], "twice"),
    ],
)
def test_none_and_twice_are_errors(spec, words):
    with pytest.raises(UsageError, match=words):
        md.devices(spec)
    with pytest.raises(ValueError, match=words):
        md.Strategy(spec)


# --- arrays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (1000,)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_arrays_are_aligned_and_contiguous(device, shape, dtype):
    array = device.allocate(shape, dtype)
    assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous
    assert array.size == 0 or array.ctypes.data % 64 == 0


@pytest.mark.parametrize("count", [1 << 15, (1 << 18) - 1, 1 << 18])
def test_large_arrays_are_like_small_ones(device, count):
    array = device.allocate((count,), "float64")
    assert array.ctypes.data % ALIGNMENT == 0 and array.shape == (count,)
    array[:] = np.arange(count)
    view = array[-2:]
    del array
    assert view.tolist() == [count - 2, count - 1]


def test_copies_are_copies(device):
    source = np.arange(12.0).reshape(3, 4).T
    inside = device.copy_in(source)
    out = device.copy_out(inside)
    source[:] = -1
    inside[:] = -2
    assert np.array_equal(out, np.arange(12.0).reshape(3, 4).T)
    other = get("cpu:1").allocate((4, 3), "float64")
    get("cpu:1").copy(other, out)
    assert np.array_equal(other, out)
    with pytest.raises(TypeError):
        device.copy(device.allocate((4, 3), "float32"), out)  # no conversion on the way


# --- streams ------------------------------------------------------------------------------------


def test_compute_is_inline_and_done_at_once(device):
    seen = []
    stream = device.stream("compute")
    stream.submit(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()] and stream.record().done()


@pytest.mark.parametrize("role", ["copy", "communication"])
def test_a_stream_does_its_work_in_order_on_its_own_thread(device, role):
    stream, seen = device.stream(role), []
    assert device.stream(role) is stream
    for i in range(200):
        stream.submit(lambda i=i: seen.append((i, threading.get_ident())))
    stream.synchronize(30)
    assert [i for i, _ in seen] == list(range(200))
    assert (
        len({thread for _, thread in seen}) == 1
        and threading.get_ident() not in dict(seen).values()
    )


def test_work_is_asynchronous_and_an_event_marks_its_place(device):
    stream, gate, seen = device.stream("copy"), threading.Event(), []
    stream.submit(lambda: gate.wait(30))
    before = stream.record()
    stream.submit(lambda: seen.append("after"))
    after = stream.record()
    assert not before.done() and not after.done() and seen == []
    with pytest.raises(HangError, match="copy stream of cpu:7"):
        before.wait(0.01)
    gate.set()
    before.wait(30)
    after.wait(30)
    assert before.done() and after.done() and seen == ["after"]


def test_an_event_of_an_idle_stream_has_happened(device):
    event = device.stream("copy").record()
    assert event.done()
    event.wait(0)


def test_a_stream_waits_for_another_ones_event(device):
    copy, communication, gate, seen = (
        device.stream("copy"),
        device.stream("communication"),
        threading.Event(),
        [],
    )
    copy.submit(lambda: gate.wait(30))
    copy.submit(lambda: seen.append("copied"))
    communication.wait(copy.record())
    communication.submit(lambda: seen.append("reduced"))
    copy.wait(copy.record())  # its own event holds nobody back
    gate.set()
    communication.synchronize(30)
    assert seen == ["copied", "reduced"]


def test_the_source_of_an_asynchronous_copy_may_be_dropped(device):
    stream, gate = device.stream("copy"), threading.Event()
    destination = device.allocate((1000,), "float64")
    stream.submit(lambda: gate.wait(30))
    stream.copy(destination, np.full(1000, 3.0))
    gate.set()
    stream.synchronize(30)
    assert (destination == 3).all()


def test_a_failure_reaches_who_waits_and_skips_what_came_after(device):
    stream, seen = device.stream("copy"), []
    gate = threading.Event()
    stream.submit(lambda: gate.wait(30))
    stream.submit(lambda: 1 / 0)
    stream.submit(lambda: seen.append("must not run"))
    gate.set()
    with pytest.raises(ZeroDivisionError):
        stream.synchronize(30)
    stream.submit(lambda: seen.append("runs again"))
    stream.synchronize(30)
    assert seen == ["runs again"]


def test_a_failure_crosses_streams(device):
    copy, communication = device.stream("copy"), device.stream("communication")
    copy.submit(lambda: 1 / 0)
    communication.wait(copy.record())
    with pytest.raises(ZeroDivisionError):
        communication.synchronize(30)


def test_closing_ends_the_threads():
    before = threading.active_count()
    device = CpuDevice(8, "cpu:8")
    done = []
    for role in ("copy", "communication"):
        device.stream(role).submit(lambda: done.append(1))
    device.close()
    device.close()
    assert done == [1, 1] and threading.active_count() == before


def test_an_unknown_stream_is_an_error(device):
    with pytest.raises(UsageError, match="compute, copy, communication"):
        device.stream("main")


# --- leases -------------------------------------------------------------------------------------


def test_a_buffer_comes_back_only_after_its_readers_events(device):
    stream, gate = device.stream("copy"), threading.Event()
    first = device.lease((10,), "float32")
    memory = first.array.ctypes.data
    stream.submit(lambda: gate.wait(30))
    event = stream.record()
    first.release(after=[event])
    second = device.lease((10,), "float32")
    assert second.array.ctypes.data != memory  # still read by the stream
    gate.set()
    event.wait(30)
    third = device.lease((10,), "float32")
    assert third.array.ctypes.data == memory  # nothing was allocated


def test_leases_are_of_a_shape_and_dtype_and_end_once(device):
    lease = device.lease((4,), "float32")
    memory = lease.array.ctypes.data
    lease.release()
    assert device.lease((4,), "int32").array.ctypes.data != memory
    assert device.lease((2, 2), "float32").array.shape == (2, 2)
    assert device.lease((4,), "float32").array.ctypes.data == memory
    with pytest.raises(UsageError, match="twice"):
        lease.release()


def test_streams_begin_anew_in_a_forked_child():
    program = textwrap.dedent("""
        import os, warnings
        warnings.simplefilter("ignore")         # Python 3.12 warns of forking with threads
        import numpy as np, minidist as md
        def sums(strategy):
            (batch,) = strategy.distribute_dataset([np.ones(4)])
            return [float(part.numpy().sum()) for part in batch.values]
        assert sums(md.Strategy("cpu*2")) == [2, 2]
        if os.fork() == 0:
            os._exit(7 if sums(md.Strategy("cpu*2")) == [2, 2] else 1)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert out.stdout == "7\n", out


def test_closing_a_strategy_frees_the_buffers_that_its_communicators_have_leased():
    devices = md.devices("cpu*3")
    with md.Strategy(devices, all_reduce_spec="pscpu") as strategy:
        big = strategy.run(lambda: md.constant(np.ones(50_000)))
        strategy.reduce("sum", big)
        held = [array for d in (*devices, host()) for array in pooled(d)]
        assert any(array.nbytes >= 400_000 for array in held)
        del held
    assert all(not pooled(device) for device in (*devices, host()))


def pooled(device):
    return [array for free in device._pool._free.values() for array, _ in free]
