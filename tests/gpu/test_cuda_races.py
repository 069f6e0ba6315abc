"""The race checker on the stand-in: what threads do with a GPU's memory, and what its streams do.

What keeps order in cuda*.py is taken away piece by piece: the checker finds each mistake in one
run, whatever order the streams' work is done in, and also where no number is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import cuda
from mistakes import CASES, N
from policies import EVERY
from training import starts, train, two_layers

import minidist as md
from minidist.device import get
from minidist.errors import RaceError


@pytest.mark.parametrize("spec", ["cuda:0*2", "cuda*2"])
@pytest.mark.parametrize("policy", EVERY)
def test_it_finds_nothing_in_a_training(libraries: Path, policy: str, spec: str) -> None:
    with cuda(libraries, 2), md.check() as check:
        train(spec, policy, two_layers("sgd"), starts([(8, 9), (9,), (9, 3)]))
    assert not check.races


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("program", "mistake"), CASES, ids=lambda case: case.__name__)
def test_it_finds_every_mistake_at_once(
    libraries: Path, program: Callable[[], bool], mistake: Callable[..., None], seed: int
) -> None:
    with cuda(libraries, seed) as cupy:
        with md.check() as check:
            program()
        assert not check.races
        mistake(cupy)
        with pytest.raises(RaceError, match=r"stream of cuda:0|pinned|float32|uint8"), md.check():
            program()
        cupy.gpu.drain()


def test_threads_that_nothing_orders_are_found_though_the_streams_order_themselves(
    cupy: Any,
) -> None:
    """The GPU does both, one after the other; which is the first is chance."""
    device = get("cuda:0")
    array = device.ops.full((N,), 0.0, "float32")
    go = threading.Semaphore(0)  # orders nothing that the checker knows

    def write() -> None:
        device.ops.fill(array, 1.0)
        go.release()

    with md.check() as check:
        thread = threading.Thread(target=write, name="writer")
        thread.start()
        go.acquire()
        device.ops.accumulate(array, array)
        assert [race.lines for race in check.races]
        (race, *_) = check.races
        assert "a write by thread 'writer', in fill" in str(race)
        thread.join()
        with pytest.raises(RaceError):
            check.verify()


def test_what_is_ordered_by_hand_is_no_race(cupy: Any) -> None:
    device = get("cuda:0")
    other = device.stream("copy")
    with md.check() as check:
        array = device.copy_in(np.zeros(N, np.float32))
        other.submit(lambda: device.ops.accumulate(array, array))
        thread = threading.Thread(target=lambda: device.ops.fill(array, 1.0))
        thread.start()
        thread.join()
        lease = device.lease((N,), "float32")
        other.submit(lambda: device.copy(lease.array, array))
        lease.release(after=[other.record()])
        again = device.lease((N,), "float32")
        device.ops.fill(again.array, 2.0)
        assert (device.copy_out(array) == 1).all()
    assert not check.races


def test_a_buffer_that_is_used_after_its_release_is_reported(cupy: Any) -> None:
    device = get("cuda:0")
    with md.check() as check:
        lease = device.lease((N,), "float32")
        array = lease.array
        lease.release()
        device.ops.fill(array, 1.0)
        assert "return to the pool" in str(check.races[0])
        with pytest.raises(RaceError):
            check.verify()
