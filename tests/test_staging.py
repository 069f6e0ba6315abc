"""StagingArea: a queue like any other, whose slots nobody overwrites while they are read."""

from __future__ import annotations

import ctypes
import gc
import math
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections import Counter, deque
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late import LateDevice

import minidist as md
from minidist.device.cpu import CpuDevice
from minidist.errors import ClosedError, ForkError, HangError, ShapeError, UsageError

LONG = 30.0
LARGE = 1 << 18  # elements of float32 that no thread copies on the side


class Counting(CpuDevice):
    """Counts what it allocates."""

    def __init__(self):
        super().__init__(98, "cpu:98")
        self.allocated = 0

    def allocate(self, shape, dtype):
        self.allocated += 1
        return super().allocate(shape, dtype)


@pytest.fixture
def device():
    device = Counting()
    yield device
    device.close()


@pytest.fixture
def gate(device):
    """Holds the device's copy stream until it is set."""
    gate = threading.Event()
    device.stream("copy").submit(lambda: gate.wait(LONG))
    yield gate
    gate.set()


def start(*functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def finish(threads):
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)


def tensor(value, size=3, dtype="float32"):
    return md.constant(np.full(size, value, dtype))


def value(item):
    """Return the one number that all tensors of an item are full of."""
    (found,) = {float(number) for each in item for number in each.numpy().ravel()}
    return found


# --- a queue ------------------------------------------------------------------------------------


def test_what_is_put_is_got_in_order_with_its_dtypes_and_shapes():
    area = md.StagingArea(["float32", "int64", "bool", "bfloat16"], device="cpu:1")
    for i in range(2):
        area.put(
            (
                np.full((2, 3), i, np.float32),
                md.constant(i),
                [True, False],
                md.constant(np.ones((0, 4)), "bfloat16"),
            )
        )
    for i in range(2):
        floats, number, flags, none = area.get()
        assert np.array_equal(floats.numpy(), np.full((2, 3), i)) and floats.dtype == "float32"
        assert number.item() == i and number.shape == () and number.dtype == "int64"
        assert flags.numpy().tolist() == [True, False]
        assert none.shape == (0, 4) and none.dtype.name == "bfloat16"
        assert {each.device.short for each in (floats, number, flags, none)} == {"cpu:1"}
        assert all(each.array.ctypes.data % 64 == 0 for each in (floats, number, flags))


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 3)),
    st.tuples(st.just("get"), st.just(0)),
    st.tuples(st.just("peek"), st.integers(0, 2)),
    st.tuples(st.just("drop"), st.just(0)),
    st.tuples(st.just("clear"), st.just(0)),
)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3),
    st.none() | st.integers(12, 60),
    st.lists(OPERATIONS, max_size=40),
    st.lists(OPERATIONS, max_size=6),
)
def test_it_does_what_a_deque_does(capacity, memory_limit, operations, after_closing):
    """Everything that was got or peeked at is kept, and never changes."""
    area = md.StagingArea("float32", capacity=capacity, memory_limit=memory_limit)
    model, kept, number, closed = deque(), [], 0, False
    for what, argument in [*operations, ("close", 0), *after_closing]:
        nbytes = sum(4 * size for _, size in model)
        if what == "put":
            number += 1
            full = len(model) == capacity or (memory_limit or 1e9) < nbytes + 4 * argument
            error = ClosedError if closed else HangError if full else None
            call = lambda n=number, size=argument: area.put(tensor(n, size), timeout=0)  # noqa: E731
        elif what in ("get", "peek"):
            error = (
                UsageError
                if argument >= capacity
                else None
                if argument < len(model)
                else ClosedError
                if closed
                else HangError
            )
            call = {
                "get": lambda: area.get(timeout=0),
                "peek": lambda index=argument: area.peek(index, timeout=0),
            }[what]
        else:
            error = None
            call = {"close": area.close, "clear": area.clear, "drop": kept.clear}[what]
        if error is not None:
            with pytest.raises(error):
                call()
        else:
            result = call()
            if what == "put":
                model.append((number, argument))
            elif what in ("get", "peek"):
                kept.append((model.popleft() if what == "get" else model[argument], result))
            elif what == "clear":
                model.clear()
            closed |= what == "close"
        assert area.size() == len(model)
        for (n, size), item in kept:
            assert value(item) == n and item[0].shape == (size,)


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("size", [5, LARGE // 8])
def test_many_threads_put_and_take_and_nothing_is_lost_torn_or_overtaken(capacity, size):
    area = md.StagingArea(["float32", "int64"], capacity=capacity)
    each, producers, consumers = 40, 3, 2
    got = [[] for _ in range(consumers)]

    def produce(who):
        floats, whole = np.empty(size, np.float32), np.empty(2, np.int64)
        for i in range(each):
            floats[:] = whole[:] = who * each + i
            area.put((floats, whole), timeout=LONG)

    def consume(mine):
        try:
            while True:
                item = area.get(timeout=LONG)
                mine.append(value(item))
        except ClosedError:
            pass

    taking = start(*[lambda mine=mine: consume(mine) for mine in got])
    finish(start(*[lambda who=who: produce(who) for who in range(producers)]))
    area.close()
    finish(taking)
    assert Counter(chain(*got)) == Counter(range(producers * each))
    for mine in got:
        for who in range(producers):
            of_one = [n for n in mine if n // each == who]
            assert of_one == sorted(of_one)


def test_the_size_is_the_same_from_every_thread_and_peeking_takes_nothing():
    area, seen = md.StagingArea("float32", capacity=3), []
    for i in range(3):
        area.put(tensor(i))
    assert [value(area.peek(i)) for i in range(3)] == [0, 1, 2]
    finish(start(*[lambda: seen.append((area.size(), value(area.peek(1))))] * 4))
    assert seen == [(3, 1)] * 4 and area.size() == 3
    area.clear()
    assert area.size() == 0


def test_a_memory_limit_counts_the_bytes_in_the_area():
    area = md.StagingArea("float32", capacity=10, memory_limit=100)
    area.put(tensor(1, 20))
    area.put(tensor(2, 5))
    with pytest.raises(HangError, match="holds 2 of 100 bytes"):
        area.put(tensor(3, 1), timeout=0)
    held = area.get()
    area.put(tensor(3, 20))  # what is in somebody's hands does not count
    assert value(held) == 1
    with pytest.raises(UsageError, match="104 bytes can never be put"):
        area.put(tensor(4, 26))


# --- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 4])
@pytest.mark.parametrize("size", [7, LARGE])
def test_in_the_steady_state_nothing_is_allocated(device, capacity, size):
    area = md.StagingArea(["float32"] * 3, capacity=capacity, device=device)
    values = [tensor(i, size) for i in range(3)]
    held = None
    for round in range(20):
        if round == 5:
            settled = device.allocated
        for _ in range(capacity):
            area.put(values)
        for _ in range(capacity):
            held = area.get()
            assert [float(each.numpy()[-1]) for each in held] == [0, 1, 2]
    # As many slots as were ever in use: those in the area and two in the consumer's hands.
    assert device.allocated == settled <= capacity + 2


def test_lengths_that_vary_share_slots(device):
    area = md.StagingArea("float32", [(None,)], device=device)
    for size in [*range(900, 1000), *range(999, 899, -1)]:
        area.put(tensor(size, size))
        assert value(area.get()) == size
    assert device.allocated <= 4


@pytest.mark.parametrize(
    "view",
    [
        lambda item: item[0].numpy()[5:],
        lambda item: item[0].numpy()[:, None][1:].T,
        lambda item: md.ops.reshape(item[0], (10, 100)).array[3],
        lambda item: np.asarray(item[0])[::-1][10:20],
        lambda item: memoryview(item[0].array)[7:],
        lambda item: np.from_dlpack(item[0])[2:],
    ],
)
def test_a_view_holds_its_slot_as_long_as_it_lives(device, view):
    area = md.StagingArea(["float32", "float32"], capacity=1, device=device)
    area.put((tensor(1, 1000), tensor(1, 1)))
    part = view(area.get())
    for i in range(2, 6):
        area.put((tensor(i, 1000), tensor(i, 1)))
        assert value(area.get()) == i
    assert (np.asarray(part) == 1).all() and device.allocated == 2
    del part
    gc.collect()
    area.put((tensor(9, 1000), tensor(9, 1)))
    assert device.allocated == 2


def test_what_was_peeked_at_keeps_the_slot_after_it_was_taken():
    area = md.StagingArea("float32", capacity=1)
    area.put(tensor(1))
    seen = area.peek()
    assert value(area.get()) == 1
    for i in range(3):
        area.put(tensor(i + 2))
        area.get()
    assert value(seen) == 1


# --- late streams -------------------------------------------------------------------------------


def reads_later(device, item, results):
    """Give the compute stream work that reads an item's memory without holding it."""
    addresses = [(each.array.ctypes.data, each.size) for each in item]

    def read():
        found = [np.ctypeslib.as_array((ctypes.c_float * n).from_address(a)) for a, n in addresses]
        results.append({float(number) for array in found for number in array})

    device.stream("compute").submit(read)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3), st.lists(st.sampled_from("pppgggks"), max_size=60), st.randoms())
def test_on_late_streams_each_item_is_read_after_its_copy_and_before_the_next(
    capacity, program, random
):
    """Tensors are dropped as soon as the work that reads them was given, as on a GPU."""
    device = LateDevice(random.choice)
    with md.device(device):
        area = md.StagingArea(["float32"] * 2, capacity=capacity, device=device)
        model, results, expected, number = deque(), [], [], 0
        for what in program:
            if what == "p" and len(model) < capacity:
                number += 1
                area.put((tensor(number, 4), tensor(number, 40)))
                model.append(number)
            elif what == "g" and model:
                reads_later(device, area.get(), results)
                expected.append(model.popleft())
            elif what == "k" and model:
                reads_later(device, area.peek(len(model) - 1), results)
                expected.append(model[-1])
            elif what == "s":
                device.step()
        sources = 2 * number
        device.finish()
        assert results == [{each} for each in expected]
        # The copy stream waits for readers; nobody makes a slot to get round them.
        assert device.allocated - sources <= capacity + 1


def test_a_slot_is_not_used_again_before_the_readers_event():
    device, results = LateDevice(), []
    with md.device(device):
        area = md.StagingArea("float32", capacity=1, device=device)
        area.put(tensor(1))
        reads_later(device, area.get(), results)
        area.put(tensor(2))
        copy, compute = device.stream("copy"), device.stream("compute")
        while copy.ready():
            copy.step()
        assert copy.queue and not results  # it waits for the reading of the first item
        while compute.ready():
            compute.step()
        assert results == [{1}]
        reads_later(device, area.get(), results)
        device.finish()
    assert results == [{1}, {2}] and device.allocated == 2 + 1


def test_the_copy_waits_for_what_computes_the_source():
    device = LateDevice()
    with md.device(device):
        source = tensor(0, 5)
        area = md.StagingArea("float32", device=device)
        device.stream("compute").submit(lambda: source.array.fill(7))
        event = area.put(source)
        assert not device.stream("copy").ready() and not event.done()
        got = area.get()
        device.finish()
    assert event.done() and value(got) == 7


# --- what may change after put ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1000, LARGE])
def test_arrays_and_variables_may_change_as_soon_as_put_returns(size):
    area = md.StagingArea(["float32", "float32", "float32"], capacity=1)
    array, variable = np.zeros(size, np.float32), md.Variable(np.zeros(size, np.float32))
    for i in range(10):
        array[:] = i
        variable.assign(array)
        area.put((array, variable, variable.read()))
        array[:] = -1
        variable.assign(array)
        assert value(area.get()) == i


def test_put_of_what_may_change_waits_for_the_copy_though_there_is_no_time(device, gate):
    area = md.StagingArea("float32", device=device)
    array, returned = np.ones(LARGE, np.float32), threading.Event()

    def put():
        area.put(array, timeout=0)
        returned.set()

    threads = start(put)
    while not area.size():
        pass
    assert not returned.is_set()
    gate.set()
    finish(threads)
    array[:] = 2
    assert value(area.get()) == 1


def test_tensors_are_held_until_they_have_been_copied(device, gate):
    area = md.StagingArea("float32", device=device)
    event = area.put(tensor(3, LARGE))
    assert not event.done()
    with pytest.raises(HangError, match="copy stream of cpu:98"):
        area.get(timeout=0)
    assert area.size() == 1  # too late is not lost
    gate.set()
    assert value(area.get()) == 3 and event.done()


def test_what_is_promised_to_stay_unchanged_is_not_waited_for(device, gate):
    area = md.StagingArea(["float32", "float32"], device=device)
    array, variable = np.full(LARGE, 4, np.float32), md.Variable(np.full(LARGE, 4, np.float32))
    event = area.put((array, variable), unchanged=True)
    assert not event.done()
    gate.set()
    event.wait(LONG)
    array[:] = 5
    variable.assign(array)
    assert value(area.get()) == 4


# --- failures -----------------------------------------------------------------------------------


class Broken(CpuDevice):
    """Cannot copy what begins with 13."""

    def __init__(self):
        super().__init__(97, "cpu:97")

    def copy(self, destination, source):
        if source.size and source.ravel()[0] == 13:
            raise MemoryError("unlucky")
        super().copy(destination, source)


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_failing_copy_reaches_who_takes_the_item_and_no_other(size):
    device = Broken()
    area = md.StagingArea("float32", capacity=3, device=device)
    for number in (12, 13, 14):
        area.put(tensor(number, size))
    with pytest.raises(MemoryError, match="unlucky"):
        area.peek(1)
    assert value(area.get()) == 12
    with pytest.raises(MemoryError, match="unlucky"):
        area.get()
    assert value(area.get()) == 14 and area.size() == 0
    device.close()


def test_no_memory_for_a_slot_is_an_error_of_put_and_leaves_the_area_as_it_was(device, monkeypatch):
    area = md.StagingArea("float32", device=device)
    area.put(tensor(1))

    def none_left(shape, dtype):
        raise MemoryError("none left")

    monkeypatch.setattr(area._pool, "_allocate", none_left)
    with pytest.raises(MemoryError, match="none left"):
        area.put(tensor(2))
    monkeypatch.undo()
    area.put(tensor(3))
    assert [value(area.get()), value(area.get())] == [1, 3]


def test_a_stream_that_failed_before_fails_who_relied_on_it_and_then_goes_on(device, gate):
    area = md.StagingArea("float32", device=device)
    stream = device.stream("copy")
    stream.submit(lambda: 1 / 0)
    failed = stream.record()
    area.put(tensor(1, LARGE))
    gate.set()
    with pytest.raises(ZeroDivisionError):
        area.get()
    assert area.size() == 0
    area.put(tensor(2, LARGE))
    assert value(area.get()) == 2
    with pytest.raises(ZeroDivisionError):
        failed.wait(LONG)  # nobody has taken that away


# --- waiting ------------------------------------------------------------------------------------


def test_who_waits_gets_what_comes():
    area, got = md.StagingArea("float32", capacity=1), []
    threads = start(lambda: got.append(value(area.get(math.inf))))
    area.put(tensor(1))
    finish(threads)
    area.put(tensor(2))
    threads = start(lambda: area.put(tensor(3), math.inf))
    got.append(value(area.get()))
    got.append(value(area.get()))
    finish(threads)
    area.put(tensor(4))
    threads = start(lambda: area.put(tensor(5)))
    area.clear()
    got.append(value(area.get()))
    finish(threads)
    assert got == [1, 2, 3, 5] and area.size() == 0


def test_without_a_timeout_it_is_the_strategys_patience(caplog):
    with md.Strategy("cpu*1", report_after=0.01, deadline=0.2) as strategy, strategy.scope():
        area = md.StagingArea("float32", capacity=1)
        with pytest.raises(HangError, match=r"deadline is 0.2 s\) an item of <StagingArea"):
            area.get()
        area.put(tensor(0))
        with pytest.raises(HangError, match="waits for room"):
            area.put(tensor(0))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "nobody puts one" in caplog.messages[0] and "nobody takes one" in caplog.messages[1]


@pytest.mark.parametrize("timeout", [-1, math.nan, "1"])
def test_a_timeout_is_seconds(timeout):
    area = md.StagingArea("float32")
    with pytest.raises(UsageError, match="timeout"):
        area.get(timeout)
    with pytest.raises(UsageError, match="timeout"):
        area.put(tensor(1), timeout)


def test_closing_wakes_all_who_wait_and_drains_in_order():
    area, empty = md.StagingArea("float32", capacity=2), md.StagingArea("float32")
    area.put(tensor(1))
    area.put(tensor(2))
    woken, waiting = [], threading.Semaphore(0)

    def wait(call):
        waiting.release()
        try:
            call()
        except ClosedError as error:
            woken.append(str(error))

    threads = start(
        *[lambda: wait(lambda: empty.get(math.inf))] * 2,
        lambda: wait(lambda: empty.peek(1, math.inf)),
        *[lambda: wait(lambda: area.put(tensor(3), math.inf))] * 2,
    )
    for _ in threads:
        waiting.acquire(timeout=LONG)
    area.close()
    empty.close()
    finish(threads)
    assert sorted(each.partition(" was closed, and ")[2] for each in woken) == [
        *["nothing can be put into it any more"] * 2,
        *["nothing is left in it any more"] * 3,
    ]
    assert [value(area.get()), value(area.get())] == [1, 2]
    with pytest.raises(ClosedError):
        area.get()
    area.close()


def interrupt(call):
    """Call, and press Ctrl-C meanwhile."""
    ready = threading.Event()

    def press():
        ready.wait(LONG)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def wait():
        ready.set()
        call()

    threads = start(press)
    with pytest.raises(KeyboardInterrupt):
        wait()
    finish(threads)


def test_ctrl_c_interrupts_the_wait_and_loses_nothing():
    area = md.StagingArea("float32", capacity=1)
    interrupt(lambda: area.get(math.inf))
    area.put(tensor(1))
    interrupt(lambda: area.put(tensor(2), math.inf))
    assert value(area.get()) == 1 and area.size() == 0


def test_ctrl_c_interrupts_the_wait_for_a_copy(device, gate):
    area = md.StagingArea("float32", device=device)
    area.put(tensor(1, LARGE))
    interrupt(lambda: area.get(math.inf))
    interrupt(device.stream("copy").synchronize)
    gate.set()
    assert value(area.get()) == 1


# --- what it leaves behind ----------------------------------------------------------------------


def test_a_thousand_openings_and_closings_leave_nothing(device):
    value = tensor(1, 20_000)

    def open_and_close(times):
        for i in range(times):
            area = md.StagingArea("float32", device=device)
            area.put(value)
            if i % 2:
                held = area.get()
                area.put(value)
            area.close()
            held = None  # noqa: F841

    open_and_close(10)
    device.stream("copy").synchronize(LONG)
    gc.collect()
    threads = threading.active_count()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    gc.disable()  # nothing is left to the garbage collector
    try:
        open_and_close(1000)
    finally:
        gc.enable()
    device.stream("copy").synchronize(LONG)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert threading.active_count() == threads
    assert after - before < 4 * value.array.nbytes and peak - before < 8 * value.array.nbytes


def test_a_closed_area_keeps_no_slots(device):
    area = md.StagingArea("float32", device=device)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(2):
        area.put(np.zeros(LARGE, np.float32))
    held = area.get()
    area.close()
    area.get()
    del held
    device.stream("copy").synchronize(LONG)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < LARGE


def test_the_interpreter_ends_while_threads_wait_and_tensors_live():
    program = """
        import threading, numpy as np, minidist as md
        area, full = md.StagingArea("float32"), md.StagingArea("float32", capacity=1)
        full.put(np.zeros(5, "float32"))
        for call in (area.get, lambda: full.put(np.zeros(5, "float32"))):
            threading.Thread(target=call, daemon=True).start()
        other = md.StagingArea("float32")
        other.put(md.constant(np.zeros(10**7, "float32")))
        kept = full.peek()
        print(full)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"<StagingArea (float32) on cpu:0, capacity 1>\n"


def test_a_fork_is_an_error_with_a_cure_and_a_new_area_works_in_the_child():
    program = """
        import os, warnings
        warnings.simplefilter("ignore")         # Python 3.12 warns of forking with threads
        import numpy as np, minidist as md
        large = md.constant(np.ones(10**6, "float32"))
        area = md.StagingArea("float32")
        area.put(large)
        if os.fork() == 0:
            for call in (area.get, area.peek, area.clear, lambda: area.put(large)):
                try:
                    call()
                    os._exit(1)
                except md.errors.ForkError as error:
                    assert "make one in the child" in str(error)
            again = md.StagingArea("float32")
            again.put(large)
            os._exit(7 if again.get()[0].numpy().sum() == 10**6 else 2)
        print(os.waitstatus_to_exitcode(os.wait()[1]), int(area.get()[0].numpy().sum()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60, text=True
    )
    assert done.stdout == "7 1000000\n", done
    assert issubclass(ForkError, RuntimeError)


# --- misuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((tensor(1),), "1 values .* has 2"),
        ((tensor(1), tensor(1, 2), tensor(1)), "3 values .* has 2"),
        (np.zeros((2, 3), np.float32), "1 values"),
        ((tensor(1, dtype="float64"), tensor(1, (2, 3))), "value 0 .* dtype float64, not float32"),
        ((1.5, tensor(1, (2, 3))), r"value 0 .* shape \(\), not \(3,\)"),
        ((tensor(1, 4), tensor(1, (2, 3))), r"value 0 .* shape \(4,\), not \(3,\)"),
        ((tensor(1), tensor(1, (2, 4))), r"value 1 .* shape \(2, 4\), not \(None, 3\)"),
        ((tensor(1), tensor(1, (3,))), r"value 1 .* shape \(3,\), not \(None, 3\)"),
        ((["a"], tensor(1, (2, 3))), "value 0 .* dtype <U1"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(values, message):
    area = md.StagingArea(["float32", "float32"], [(3,), (None, 3)], capacity=1)
    with pytest.raises(ShapeError, match=message) as raised:
        area.put(values)
    assert isinstance(raised.value, ValueError) and area.size() == 0
    area.put(([1, 2, 3], tensor(1, (0, 3))))
    with pytest.raises(ShapeError):  # though there is no room
        area.put(values, timeout=0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((["float32"], [(1,), (2,)]), {}, "1 dtypes was given 2 shapes"),
        (("float32", (3,)), {}, "for each tensor a shape"),
        (([],), {}, "numbers and booleans"),
        ((["float32", "U3"],), {}, "numbers and booleans"),
        ((object,), {}, "numbers and booleans"),
        (("float32",), {"capacity": 0}, "capacity"),
        (("float32",), {"capacity": 1.0}, "capacity"),
        (("float32",), {"memory_limit": 0}, "memory_limit"),
        (("float32",), {"device": "tpu:0"}, "is no device here"),
    ],
)
def test_an_area_that_cannot_be_is_refused(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        md.StagingArea(*arguments, **options)


@pytest.mark.parametrize("dtypes", [None, "foo", [], ["float32", None], "complex64", "S3", 3.5])
def test_dtypes_that_are_none_are_refused(dtypes):
    with pytest.raises(ValueError, match="for numbers and booleans"):
        md.StagingArea(dtypes)


@pytest.mark.parametrize("shapes", [3, [3], [(-1,)], [(2.5,)], [("2",)], "ab"])
def test_shapes_that_are_none_are_refused(shapes):
    with pytest.raises(ValueError, match="shapes has for each tensor a shape"):
        md.StagingArea("float32", shapes)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("int8", 300, False),
        ("uint8", 3, True),
        ("uint8", -1, False),
        ("int8", -128, True),
        ("uint8", [0, 255], True),
        ("int64", 2.0, False),
        ("float32", 3, True),
        ("bool", True, True),
    ],
)
def test_numbers_become_what_the_area_is_for_where_they_fit(dtype, value, fits):
    with md.StagingArea(dtype) as area:
        if fits:
            area.put((value,))
            (tensor,) = area.get()
            assert tensor.dtype == dtype and np.array_equal(tensor.numpy(), value)
        else:
            with pytest.raises(ValueError, match="convert it"):
                area.put((value,))
