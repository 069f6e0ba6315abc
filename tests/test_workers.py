"""Worker threads: the same batches whatever their number, and failures that reach the caller."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist.checking.fuzz import fuzz
from minidist.data import Batches
from minidist.data.pixels import Pixels
from minidist.data.repeated import Repeated
from minidist.data.workers import Workers
from minidist.errors import ClosedError, DataError, HangError, UsageError


def pixels(count: int) -> Pixels:
    random = np.random.default_rng(0)
    return Pixels(random.integers(0, 256, (count, 5, 4, 3), np.uint8), np.arange(count), pad=2)


class Slow:
    """A Split of numbers whose reading can be made to wait or to fail."""

    shape: tuple[int, ...] = ()
    dtype = np.dtype(np.float32)
    label_shape: tuple[int, ...] = ()
    grain = 1

    def __init__(self, count: int, before: Any) -> None:
        self.count = count
        self.before = before

    def __len__(self) -> int:
        return self.count

    def order(self, seed: int, epoch: int) -> Any:
        return np.arange(self.count)

    def read(self, numbers: Any, seed: int, epoch: int, inputs: Any, labels: Any) -> None:
        for number in numbers.tolist():
            self.before(number)
        inputs[...] = labels[...] = numbers


def at_work() -> list[str]:
    return [one.name for one in threading.enumerate() if "minidist worker" in one.name]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_batches_do_not_depend_on_the_workers(
    size: int, workers: int, ahead: int, seed: int
) -> None:
    def made(**how: int) -> list[tuple[Any, Any]]:
        split = pixels(40)
        return [(x.copy(), y) for x, y in Batches(split, size, seed=seed, epochs=2, **how)]

    alone = made()
    for one, other in zip(alone, made(workers=workers, ahead=ahead), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    assert not at_work()


def test_parts_are_rows_of_the_whole_also_when_they_are_distorted() -> None:
    whole = list(Batches(pixels(11), 4, seed=1, epochs=2))
    parts = Batches(pixels(11), 4, seed=1, epochs=2, workers=2).parts(lambda n: slice(1, n - 1))
    for part, (images, labels) in zip(parts, whole, strict=True):
        assert part.examples == len(labels)
        np.testing.assert_array_equal(part.values[0], images[1:-1])
        np.testing.assert_array_equal(part.values[1], labels[1:-1])


def test_epochs_are_distorted_differently() -> None:
    split, batches = pixels(6), Batches(pixels(6), 6, seed=1, shuffle=False, epochs=2)
    first, second = (images for images, _ in batches)
    assert first.shape == (6, *split.shape)
    assert not np.array_equal(first, second)


def test_pieces_are_read_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)  # broken where fewer than three read
    batches = Batches(Slow(6, lambda _: together.wait()), 3, seed=0, epochs=1, workers=3)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2], [3, 4, 5]]


def test_workers_are_no_further_than_ahead() -> None:
    begun: list[int] = []
    batches = iter(Batches(Slow(40, begun.append), 2, seed=0, workers=1, ahead=3))
    next(batches)
    batches.close()
    assert max(begun) < 2 * (1 + 3)


def test_the_first_failure_of_a_batch_reaches_the_caller_as_it_is() -> None:
    def fail(number: int) -> None:
        if number >= 4:
            raise DataError(f"shard-{number}: byte 7: damaged")

    for workers in (1, 3):
        batches = iter(Batches(Slow(8, fail), 2, seed=0, workers=workers, ahead=2))
        assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(DataError, match=r"^shard-4: byte 7: damaged$"):
            next(batches)
        assert not at_work()


def test_a_worker_that_hangs_is_named() -> None:
    let_go = threading.Event()
    batches = Batches(Slow(4, lambda _: let_go.wait()), 2, seed=0, workers=2, deadline=0.1)
    try:
        with pytest.raises(
            HangError, match=r"2 of 2 pieces .*\n'minidist worker \d of Batches' is at"
        ):
            next(iter(batches))
    finally:
        let_go.set()


def test_who_waits_for_closed_workers_is_told() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(30)

    workers = Workers(1, "closed")
    reading = workers.give([slow, slow])
    assert begun.wait(30)
    workers.close()
    go_on.set()
    with pytest.raises(ClosedError, match="closed before they read"):
        workers.wait(reading)


def test_dropped_workers_end() -> None:
    workers = Workers(2, "nothing")
    mine = list(workers._threads)
    del workers
    gc.collect()
    for thread in mine:
        thread.join(20)
    assert not any(thread.is_alive() for thread in mine)


def test_one_batch_is_fed_again_and_again() -> None:
    read: list[int] = []
    fed = iter(Repeated(Batches(Slow(8, read.append), 2, seed=0)))
    assert [next(fed)[1].tolist() for _ in range(5)] == [[0, 1]] * 5
    assert read == [0, 1]


@pytest.mark.parametrize("how", [{"workers": -1}, {"ahead": 0}])
def test_impossible_numbers_are_named(how: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="workers must be at least 0 and ahead at least 1"):
        Batches(pixels(3), 2, seed=0, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_workers_may_take_turns_in_any_order(seed: int) -> None:
    def made() -> list[Any]:
        batches = Batches(pixels(30), 6, seed=1, epochs=2, workers=2)
        with md.Strategy("cpu*2") as strategy:
            fed = strategy.distribute_dataset(batches)
            return [[part.numpy() for part in strategy.local_results(images)] for images, _ in fed]

    expected = made()
    with md.check() as checking, fuzz(seed) as order:
        found = made()
        checking.verify()
    np.testing.assert_equal(found, expected)
    assert not order.let_go, "nobody could go on"
