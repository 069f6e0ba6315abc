"""Reading ahead: beside the computation, in order, bounded, and no thread stays behind."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import minidist as md
from minidist.errors import ContextError, EndOfDataError, HangError, ShapeError, UsageError

LONG = 30  # seconds that nothing here takes


def readers(source):
    """Return the threads that read what a function of this name generates."""
    return [thread for thread in threading.enumerate() if repr(source.__qualname__) in thread.name]


def number(batch):
    return int(md.local_results(batch)[0].numpy()[0])


@pytest.fixture
def strategy():
    with md.Strategy("cpu*2") as strategy:
        yield strategy


# --- ahead of time ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_so_many_batches_are_read_ahead_and_no_more(strategy, prefetch):
    asked, ahead = 0, threading.Semaphore(0)

    def counted():
        for i in range(10):
            assert i + 1 <= asked + prefetch
            ahead.release()
            yield np.full(2, i)

    batches = iter(strategy.distribute_dataset(counted(), prefetch=prefetch))
    for _ in range(prefetch):
        assert ahead.acquire(timeout=LONG)  # nobody has asked for any
    for i in range(10):
        asked += 1
        assert number(next(batches)) == i
    with pytest.raises(StopIteration):
        next(batches)


def test_the_next_batch_is_read_while_replicas_compute(strategy):
    computing, read = threading.Event(), threading.Event()

    def while_they_compute():
        yield np.zeros(2)
        assert computing.wait(LONG)
        read.set()
        yield np.ones(2)

    def step(x):
        computing.set()
        return read.wait(LONG)

    batches = iter(strategy.distribute_dataset(while_they_compute(), prefetch=1))
    assert all(strategy.local_results(strategy.run(step, next(batches))))
    assert number(next(batches)) == 1


def test_the_reader_inherits_the_context_in_which_it_began(strategy):
    def contexts():
        yield np.full(2, md.get_strategy() is strategy and md.in_cross_replica_context())

    with strategy.scope():
        batches = iter(strategy.distribute_dataset(contexts()))
    assert number(next(batches)) == 1


def test_a_source_may_use_its_array_again(strategy):
    array = np.zeros(4)

    def same_array():
        for i in range(20):
            array[:] = i
            yield array

    for i, batch in enumerate(strategy.distribute_dataset(same_array(), prefetch=3)):
        assert all((part.numpy() == i).all() for part in batch.values)


# --- failures -----------------------------------------------------------------------------------


def test_an_error_of_the_source_comes_after_the_batches_before_it(strategy):
    def on_fire():
        yield np.zeros(2)
        yield np.ones(2)
        raise OSError("disk on fire")

    batches = iter(strategy.distribute_dataset(on_fire()))
    assert [number(next(batches)) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="disk on fire") as raised:
        next(batches)
    assert "on_fire" in raised.value.__notes__[0]
    assert raised.traceback[-1].name == "on_fire"  # the line that raised it
    assert list(batches) == [] and not readers(on_fire)
    assert issubclass(EndOfDataError, EOFError)


def test_a_batch_that_cannot_be_split_is_an_error_in_its_turn(strategy):
    for bad, message in [
        ((np.zeros(3), np.zeros(4)), "same first dimension"),
        (np.float32(1), "same first dimension"),
        ((), r"they have shapes \[\]"),
        (np.array(["a", "b"]), "cannot be placed"),
    ]:
        batches = iter(strategy.distribute_dataset([np.zeros(2), bad]))
        next(batches)
        with pytest.raises(ShapeError, match=message):
            next(batches)


@pytest.mark.parametrize("report_after", [0.05, LONG])
def test_a_source_that_does_not_deliver_is_reported_and_then_an_error(caplog, report_after):
    hung = threading.Event()

    def sleeping_beauty():
        yield np.zeros(2)
        hung.wait(LONG)

    with md.Strategy("cpu*2", report_after=report_after, deadline=0.2) as strategy:
        batches = iter(strategy.distribute_dataset(sleeping_beauty()))
        next(batches)
        with pytest.raises(HangError) as raised:
            next(batches)
    said = str(raised.value)
    assert "item 2" in said and "sleeping_beauty" in said and "hung.wait(LONG)" in said
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (report_after < 1)
    assert list(batches) == []
    (thread,) = readers(sleeping_beauty)
    hung.set()
    thread.join(LONG)
    assert not thread.is_alive()


def test_ctrl_c_interrupts_the_wait_for_a_batch_and_loses_none(strategy):
    waiting, go_on = threading.Event(), threading.Event()

    def slow():
        yield np.zeros(2)
        waiting.wait(LONG)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        go_on.wait(LONG)
        yield np.ones(2)

    def wait():
        waiting.set()
        next(batches)

    batches = iter(strategy.distribute_dataset(slow()))
    assert number(next(batches)) == 0
    with pytest.raises(KeyboardInterrupt):
        wait()
    go_on.set()
    assert number(next(batches)) == 1
    assert list(batches) == []


# --- the end ------------------------------------------------------------------------------------


def test_no_thread_stays_when_the_data_ends_or_a_loop_is_left(strategy):
    def forever():
        while True:
            yield np.zeros(2)

    def three():
        yield from [np.zeros(2)] * 3

    assert len(list(strategy.distribute_dataset(three()))) == 3
    assert not readers(three)

    for _ in strategy.distribute_dataset(forever()):
        threads = readers(forever)
        assert len(threads) == 1
        break
    gc.collect()
    threads[0].join(LONG)
    assert not readers(forever)


def test_a_dropped_iterator_ends_its_thread_without_the_garbage_collector(strategy):
    closed = threading.Event()

    def dropped():
        try:
            while True:
                yield np.zeros(2)
        finally:
            closed.set()

    gc.disable()
    try:
        batches = iter(strategy.distribute_dataset(dropped()))
        next(batches)
        threads = readers(dropped)
        del batches
        threads[0].join(LONG)
    finally:
        gc.enable()
    assert closed.is_set() and not readers(dropped)


def test_closing_ends_the_thread_and_the_iterator(strategy):
    def closed():
        while True:
            yield np.zeros(2)

    with iter(strategy.distribute_dataset(closed())) as batches:
        next(batches)
    assert not readers(closed) and list(batches) == []
    batches.close()

    numbers = [np.full(2, i) for i in range(5)]
    dataset = strategy.distribute_dataset(numbers)
    loops = [iter(dataset), iter(dataset)]
    assert number(dataset.get_next()) == 0 and number(next(loops[0])) == 0
    dataset.close()
    assert [list(loop) for loop in loops] == [[], []]
    assert number(dataset.get_next()) == 0  # anew


def test_closing_wakes_who_waits(strategy):
    waiting, go_on = threading.Event(), threading.Event()

    def woken():
        waiting.set()
        go_on.wait(LONG)
        yield np.zeros(2)

    got = []
    batches = iter(strategy.distribute_dataset(woken()))
    consumer = threading.Thread(target=lambda: got.append(list(batches)))
    consumer.start()
    waiting.wait(LONG)
    batches._batches.stop()
    consumer.join(LONG)
    assert got == [[]]
    go_on.set()


def test_a_source_may_close_its_own_iterator(strategy):
    def ouroboros():
        yield np.zeros(2)
        batches.close()
        yield np.ones(2)

    batches = iter(strategy.distribute_dataset(ouroboros(), prefetch=1))
    assert len(list(batches)) <= 1
    for thread in readers(ouroboros):
        thread.join(LONG)
    assert not readers(ouroboros)


def test_several_threads_may_share_an_iterator(strategy):
    batches = iter(strategy.distribute_dataset([np.full(2, i) for i in range(200)]))
    got = [[] for _ in range(4)]

    def consume(mine):
        mine += [number(batch) for batch in batches]

    threads = [threading.Thread(target=consume, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(itertools.chain(*got)) == list(range(200))
    assert all(mine == sorted(mine) for mine in got)


def test_the_interpreter_ends_while_batches_are_read():
    program = """
        import threading, numpy as np, minidist as md
        strategy = md.Strategy("cpu*2")
        def forever():
            while True:
                yield np.zeros((100, 100))
        def stuck():
            yield np.zeros(2)
            threading.Event().wait()
        batches = [iter(strategy.distribute_dataset(source())) for source in (forever, stuck)]
        print([next(each).values[0].shape for each in batches])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"[(50, 100), (1,)]\n"


def test_a_fork_while_reading_is_an_error_with_a_cure():
    program = """
        import os, warnings
        warnings.simplefilter("ignore")         # Python 3.12 warns of forking with threads
        import numpy as np, minidist as md
        batches = iter(md.Strategy("cpu*2").distribute_dataset([np.zeros(2)] * 9))
        next(batches)
        child = os.fork()
        if child == 0:
            try:
                next(batches)
            except md.errors.ForkError as error:
                print(error, flush=True)
                os._exit(7)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert "in the child anew" in done.stdout and done.stdout.endswith("7\n"), done


# --- misuse -------------------------------------------------------------------------------------


def test_an_iterator_as_a_source_is_read_once(strategy):
    dataset = strategy.distribute_dataset(iter([np.zeros(2)] * 4))
    next(iter(dataset))
    with pytest.raises(UsageError, match="only once"):
        iter(dataset)


def test_what_cannot_be_a_data_set_is_refused_at_once(strategy):
    with pytest.raises(UsageError, match="iterable of batches, not of 3"):
        strategy.distribute_dataset(3)
    for prefetch in (0, True, 1.5):
        with pytest.raises(UsageError, match="prefetch"):
            strategy.distribute_dataset([], prefetch=prefetch)


def test_batches_are_for_all_replicas_and_not_taken_in_one(strategy):
    dataset = strategy.distribute_dataset([np.zeros(2)] * 2)
    batches = iter(dataset)
    with pytest.raises(ContextError, match="take it outside run"):
        strategy.run(lambda: next(batches))
    with pytest.raises(ContextError, match="distribute_dataset was called in replica"):
        strategy.run(lambda: strategy.distribute_dataset([]))
    merged = strategy.run(lambda: md.get_replica_context().merge_call(lambda s: next(batches)))
    assert md.local_results(merged)[1].shape == (1,)
