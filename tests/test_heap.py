"""Heaps give arrays memory of their own, take it back, and do not ask the system for it twice."""

from __future__ import annotations

import contextvars
import gc
import os
import resource
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist.kernels import heap as heaps
from minidist.kernels.heap import Heap
from minidist.train import train_step

HUGE = 1 << 21
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 3 * HUGE))


def within(heap, call):
    """Return what `call` does in a context whose arrays lie in the heap."""

    def inside():
        heap.use()
        return call()

    return contextvars.copy_context().run(inside)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["new", "zeros", "drop", "resize", "trim"]), SIZES)))
def test_arrays_keep_what_they_hold_whatever_comes_and_goes(program):
    heap = Heap()
    arrays: list[tuple[np.ndarray, int]] = []

    def holds(array, value, until=None):
        return (array[:until] == value).all()

    for number, (verb, size) in enumerate(program):
        value = number % 251
        if verb in ("new", "zeros"):
            if verb == "new":
                array = heap.empty((size,), np.uint8)
            else:
                array = within(heap, lambda size=size: np.zeros(size, np.uint8))
                assert not array.any()
            assert array.ctypes.data % 64 == 0
            array.fill(value)
            arrays.append((array, value))
            del array
        elif verb == "trim":
            heap.trim()
        elif arrays:
            array, old = arrays.pop(size % len(arrays))
            assert holds(array, old)
            if verb == "resize":
                kept = min(array.size, size)
                array.resize(size, refcheck=False)
                assert holds(array, old, kept)
                array.fill(value)
                arrays.append((array, value))
            del array
        assert sum(max(array.nbytes, 1) for array, _ in arrays) <= heap.in_use <= heap.mapped
    assert all(holds(array, value) for array, value in arrays)
    arrays.clear()
    assert heap.in_use == 0
    heap.trim()
    assert heap.mapped == 0


def test_what_was_freed_is_used_again():
    heap = Heap()

    def step():
        arrays = [heap.empty((size,), np.float32) for size in (3, 5_000, 700_000, 90_000)]
        arrays.pop(1)
        arrays.append(heap.empty((1 << 20,), np.float32))

    step()
    requests, mapped = heap.requests, heap.mapped
    for _ in range(100):
        step()
    assert (heap.requests, heap.mapped) == (requests, mapped)


def test_free_neighbours_become_one():
    heap = Heap()
    arrays = [heap.empty((HUGE // 8,), np.uint8) for _ in range(70)]
    requests = heap.requests
    assert requests > 1  # so they join across what was given at different times
    del arrays[::2]
    del arrays[:]
    heap.empty((8 * HUGE,), np.uint8)
    assert heap.requests == requests


def test_a_block_is_looked_for_in_a_few_of_many():
    heap = Heap()
    arrays = [heap.empty((size,), np.uint8) for _ in range(100) for size in (4096, 64)]
    large, behind = (heap.empty((size,), np.uint8) for size in (4160, 64))
    address = large.ctypes.data
    del large  # both sizes are of one list, in which what was freed first comes last
    del arrays[::2]
    assert heap.empty((4160,), np.uint8).ctypes.data != address
    assert behind.size


def test_a_heap_belongs_to_the_context_that_asked_for_it():
    heap = Heap()
    inside = within(heap, lambda: np.ones(1000))
    used = heap.in_use
    assert used >= inside.nbytes
    outside = np.ones(1000)
    heap.empty((10,), np.float32)
    assert heap.in_use == used and (inside == outside).all()


def test_replicas_compute_in_the_memory_of_their_devices():
    with md.Strategy("cpu*2") as strategy:
        before = [device.heap.in_use for device in strategy.devices]
        results = strategy.local_results(strategy.run(lambda: np.ones(5000)))
        for device, used in zip(strategy.devices, before, strict=True):
            assert device.heap.in_use - used >= results[0].nbytes


def test_arrays_outlive_their_heap_and_may_be_freed_by_any_thread():
    heap = Heap()
    arrays = [heap.empty((size,), np.float64) for size in (5, 500, 500_000)]
    for array in arrays:
        array.fill(7)
    del heap, array
    gc.collect()
    thread = threading.Thread(target=arrays.pop)
    thread.start()
    thread.join()
    assert all((array == 7).all() for array in arrays)
    del arrays


def test_threads_share_a_heap():
    heap, failures = Heap(), []

    def use(number):
        def job():
            kept = []
            for i in range(300):
                array = np.full(1 + (i * 7919 * (number + 1)) % 20_000, number)
                kept.append(array)
                if len(kept) > 20:
                    if not all((array == number).all() for array in kept):
                        failures.append(number)
                    del kept[::2]

        within(heap, job)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and heap.in_use == 0


def test_what_lies_idle_goes_back():
    heap = Heap()
    kept = heap.empty((1000,), np.uint8)
    heap.empty((16 * HUGE,), np.uint8)
    for _ in range(10_000):
        heap.empty((HUGE,), np.uint8)
    assert heap.mapped <= 2 * HUGE and kept.size == 1000


def test_what_is_used_does_not():
    heap = Heap()
    for _ in range(1000):
        heap.empty((16 * HUGE,), np.uint8)
    assert heap.requests == 1


def test_after_a_trim_what_gets_free_goes_back_at_once():
    heap = Heap()
    array = heap.empty((4 * HUGE,), np.uint8)
    heap.trim()
    assert heap.mapped > 4 * HUGE
    del array
    assert heap.mapped == 0


def resident():
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


def test_a_trim_leaves_room_behind_an_array_that_ends_close_to_a_huge_page():
    heap = Heap()
    heap.empty((4 * HUGE,), np.uint8)
    array = heap.empty((HUGE - 256,), np.uint8)  # with its head and those around it a huge page
    array.fill(1)
    heap.trim()
    assert heap.mapped == 2 * HUGE
    for size in (64, HUGE // 2, 4 * HUGE):
        heap.empty((size,), np.uint8).fill(2)
        heap.trim()
    assert heap.mapped == 2 * HUGE and (array == 1).all()


def test_zeros_do_not_touch_what_comes_from_the_system():
    heap = Heap()
    kept = heap.empty((1000,), np.uint8)
    before = resident()
    zeros = within(heap, lambda: np.zeros(20 * HUGE, np.uint8))
    assert resident() - before <= 4 * HUGE
    zeros.fill(1)
    del zeros
    assert not within(heap, lambda: np.zeros(25 * HUGE, np.uint8)).any() and kept.size


def test_a_trim_also_gives_back_what_lies_between_arrays():
    heap = Heap()
    first, second = (heap.empty((16 * HUGE,), np.uint8) for _ in range(2))
    first.fill(1)
    second.fill(2)
    del first
    before = resident()
    heap.trim()
    assert before - resident() >= 12 * HUGE and heap.mapped > 32 * HUGE
    assert (second == 2).all()
    again = heap.empty((16 * HUGE,), np.uint8)
    again.fill(3)
    assert heap.requests <= 2 and (second == 2).all()


def test_closing_a_strategy_gives_memory_back():
    with md.Strategy("cpu*1") as strategy:
        heap = strategy.devices[0].heap
        heap.trim()
        before = heap.mapped
        strategy.run(lambda: np.empty(10 * HUGE, np.uint8).size)
        assert heap.mapped >= before + 8 * HUGE
    assert heap.mapped <= before


def test_poison():
    heap = Heap()
    heaps.poison(1)
    try:
        array = heap.empty((3,), np.float32)
        assert np.isnan(array).all()
        assert not within(heap, lambda: np.zeros(5)).any()
        heaps.poison(1)
        heaps.poison(-1)
        assert (heap.empty((2,), np.int64) == -1).all()
    finally:
        heaps.poison(-1)
    array.fill(0)
    del array
    assert not np.isnan(heap.empty((3,), np.float32)).any()


# --- processes ----------------------------------------------------------------------------------


def test_a_forked_child_has_its_own():
    heap = Heap()
    array = heap.empty((50_000,), np.float64)
    array.fill(1)
    blocks = [heap.empty((size,), np.uint8) for _ in range(20) for size in (2 * HUGE, 1)]
    del blocks[::2]
    stop = threading.Event()

    def work():
        while not stop.is_set():
            heap.trim()  # which has the heap's lock for long, and not Python's

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # of threads, which is the point
                child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # ends a child that waits for a lock
                new = heap.empty((50_000,), np.float64)
                new.fill(2)
                array.fill(3)
                heap.trim()
                os._exit(0 if (new == 2).all() else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert (array == 1).all() and blocks


def python(program):
    """Return what a program prints; it must end well and say nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_arrays_may_be_left_at_the_end():
    python(
        """
        import threading
        import numpy as np
        import minidist as md

        strategy = md.Strategy("cpu*2")
        kept = strategy.run(lambda: md.constant(np.ones((300, 300))))
        md.kept = strategy.run(lambda: np.ones(1000))
        circle = [strategy.run(lambda: np.ones(100_000))]
        circle.append(circle)

        def loop():
            strategy.devices[0].heap.use()
            while True:
                np.empty(10_000)

        threading.Thread(target=loop, daemon=True).start()
        """
    )


def test_where_there_is_no_more_memory_other_heaps_give_back_first_and_numpy_says_so():
    out = python(
        """
        import resource
        import numpy as np
        from minidist.kernels.heap import Heap

        first, second = Heap(), Heap()
        size = 512 << 20
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size + size // 2,) * 2)
        first.empty((size,), np.uint8)
        assert first.mapped > size
        array = second.empty((size,), np.uint8)
        assert first.mapped == 0 and second.mapped > size
        try:
            first.empty((size,), np.uint8)
        except MemoryError as error:
            print(error)
        try:
            array.resize(2 * size)
        except MemoryError:
            print(array.size == size)
        array[-1] = 1
        del array
        first.empty((size,), np.uint8)
        """
    )
    assert "512. MiB" in out and "True" in out


# --- the steady state ---------------------------------------------------------------------------


def test_a_step_of_training_asks_the_system_for_nothing():
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8, 32, 32, 3), np.float32)
    labels = rng.integers(0, 10, 8)
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            model = md.models.build("resnet20", (32, 32, 3), 10)
            optimizer = md.optim.Momentum(0.01)
        batch = [strategy.run(md.constant, values) for values in (images, labels)]

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            strategy.run(train_step, model, optimizer, *batch)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        for _ in range(4):
            faults()
        heaps = [device.heap for device in strategy.devices]
        requests = [heap.requests for heap in heaps]
        steps = [faults() for _ in range(7)]
        assert all(heap.mapped > 4 * HUGE for heap in heaps)  # the weights are half of one
        assert [heap.requests for heap in heaps] == requests
        assert statistics.median(steps) <= 10  # the arrays of a step lie on thousands of pages
