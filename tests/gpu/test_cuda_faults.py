"""A GPU that has failed says so wherever its events are asked for, in CUDA's own words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import minidist as md
from minidist.device import get
from minidist.errors import HangError

N = 1000
ILLEGAL = 700  # cudaErrorIllegalAddress


def wait(device: Any) -> None:
    device.stream("compute").record().wait()


def ask(device: Any) -> None:
    device.stream("compute").record().done()


def synchronize(device: Any) -> None:
    device.synchronize()


def copy_out(device: Any) -> None:
    device.copy_out(device.allocate((N,), "float32"))


def look_at_the_clock(device: Any) -> None:
    from minidist.device.cuda_times import clock

    stream = device.stream("compute")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "synchronize", lambda timeout: None)  # only the moment is
        clock(stream)


def let_go_of_memory(device: Any) -> None:
    device.allocate((N,), "float32")


@pytest.mark.parametrize(
    "look",
    [wait, ask, synchronize, copy_out, look_at_the_clock, let_go_of_memory],
    ids=lambda look: look.__name__,
)
def test_it_is_said(standin: Any, look: Callable[[Any], None]) -> None:
    device = get("cuda:0")
    array = device.ops.full((N,), 1.0, "float32")
    device.stream("copy").submit(partial(device.ops.copy, array))
    del array  # is held for the other stream
    standin.gpu.fault = ILLEGAL
    with pytest.raises(standin.cuda.runtime.CUDARuntimeError, match="illegal memory") as info:
        look(device)
    (note,) = info.value.__notes__
    assert "cuda:0 failed" in note and "CUDA_LAUNCH_BLOCKING=1" in note


def test_a_clock_of_a_stream_that_hangs_says_which(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minidist.device.cuda_times import clock

    device = get("cuda:0")
    stream = device.stream("compute")
    device.ops.full((N,), 1.0, "float32")
    standin.gpu.late.append(stream.raw.queue)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "synchronize", lambda timeout: None)
        with pytest.raises(HangError, match="compute stream of cuda:0 did not finish"):
            clock(stream, 0.01)


def test_shares_of_a_gpu_have_one_name_and_gpus_different_ones(cupy: Any) -> None:
    one, two = md.devices("cuda:0*2")
    assert one.uuid == two.uuid
    if cupy.cuda.runtime.getDeviceCount() > 1:
        assert get("cuda:1").uuid != one.uuid
    assert one.uuid.isprintable()
