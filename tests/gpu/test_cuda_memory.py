"""A GPU's memory where it is short, held by streams that are late, or pinned and under way."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.device import get

N = 1000
MANY = 300_000  # more than a megabyte


def late(standin: Any, device: Any, role: str) -> Any:
    """Let a stream do nothing for now."""
    stream = device.stream(role)
    standin.gpu.late.append(stream.raw.queue)
    return stream


# --- blocks that other streams read


@pytest.mark.parametrize("order", [("copy", "communication"), ("communication", "copy")])
def test_memory_is_held_until_the_last_of_its_readers_is_done(
    standin: Any, order: tuple[str, str]
) -> None:
    device = get("cuda:0")
    array, copies = device.ops.full((N,), 1.0, "float32"), []
    device.synchronize()
    slow = late(standin, device, "copy")
    for role in order:
        device.stream(role).submit(lambda a=array: copies.append(device.ops.copy(a)))
    place = array.data.ptr
    del array
    device.stream("communication").synchronize()
    device.stream("compute").synchronize()
    assert device.ops.full((N,), 2.0, "float32").data.ptr != place
    standin.gpu.late.clear()
    slow.synchronize()
    again = [device.ops.full((N,), 3.0, "float32") for _ in range(3)]
    assert place in [each.data.ptr for each in again]
    assert all((device.copy_out(copy) == 1).all() for copy in copies)


def test_only_the_first_of_what_is_held_for_a_stream_is_asked_for(standin: Any) -> None:
    device = get("cuda:0")
    device.stream("compute")
    slow, arrays = late(standin, device, "copy"), []
    for _ in range(160):
        array = device.ops.full((N,), 1.0, "float32")
        slow.submit(lambda array=array: arrays.append(device.ops.copy(array)))
    del array
    standin.gpu.queries = 0
    device.allocate((N,), "float32")
    assert standin.gpu.queries <= 2
    standin.gpu.late.clear()
    slow.synchronize()
    made = device.memory.made
    more = [device.allocate((N,), "float32") for _ in range(150)]
    assert device.memory.made == made and len(more) == 150


# --- when there is no more


@pytest.mark.parametrize("reader", ["cuda:0", "cuda:0.1", "cuda:1"])
def test_where_memory_is_short_late_readers_are_waited_for(standin: Any, reader: str) -> None:
    device, other = get("cuda:0"), get(reader)
    total = other.ops.full((N,), 0.0, "float32")
    device.synchronize()
    standin.gpu.room[0] = 4 * 4 * N + 8 * 512
    add = other.stream("communication")
    for i in range(20):
        array = device.ops.full((2 * N,), i, "float32")[:N]
        add.submit(partial(other.ops.accumulate, total, array))
        del array
    wide = device.ops.full((3 * N,), 1.0, "float32")  # larger than anything that may come back
    assert (device.copy_out(wide) == 1).all()
    del wide
    assert (other.copy_out(total) == sum(range(20))).all()
    with pytest.raises(standin.cuda.memory.OutOfMemoryError):
        device.allocate((100 * N,), "float32")


def test_what_another_share_of_the_gpu_has_in_store_is_taken(standin: Any) -> None:
    one, two = md.devices("cuda:0*2")
    standin.gpu.room[0] = 4 * 4 * N
    array = one.ops.full((3 * N,), 1.0, "float32")
    copies: list[Any] = []
    one.stream("copy").submit(lambda a=array: copies.append(one.copy_out(a)))
    del array
    assert (two.copy_out(two.ops.full((3 * N,), 2.0, "float32")) == 2).all()
    assert (copies[0] == 1).all()


# --- pinned buffers


def test_a_host_that_runs_ahead_waits_and_makes_no_more_buffers(standin: Any) -> None:
    device, turns = get("cuda:0"), cycle([0] * 9 + [1])
    array = device.allocate((10,), "float32")
    standin.gpu.asked.randrange = lambda n: next(turns)  # it is asked often before it does more
    made = []
    for step in range(12):
        for _ in range(20):
            device.copy(array, np.full(10, step, np.float32))
        made.append(device.pinned.made)
    assert made[0] == 20, "a step goes on at once"
    assert made[2:] == made[2:3] * 10 and made[2] <= 40
    assert (device.copy_out(array) == 11).all()


def test_large_buffers_that_are_under_way_are_not_used_again(standin: Any) -> None:
    device = get("cuda:0")
    values = [np.full(MANY, i, np.float32) for i in range(12)]
    arrays = [device.copy_in(value) for value in values]
    assert device.pinned.made <= 5
    for array, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(device.copy_out(array), value)


# --- constants


def test_streams_do_not_push_out_each_others_constants(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = get("cuda:0")
    from minidist.device import cuda_machine

    monkeypatch.setattr(cuda_machine, "SHAPES", 1)
    machine = device.ops._machine

    def constant(n: int) -> None:
        with device.giving():
            machine.constant(np.arange(n))

    for turn in range(3):
        constant(3)
        device.stream("copy").submit(lambda: constant(4))
        assert standin.gpu.calls.count("copy") == 2, turn
