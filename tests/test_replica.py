"""Replica threads and merge_call: who runs what where, and how a run ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from functools import partial

import pytest

import minidist as md
from minidist import pool, run, threads
from minidist.errors import (
    ContextError,
    ForkError,
    HangError,
    MergeMismatchError,
    StructureError,
    UsageError,
)

DEVICES = [1, 2, 3, 5]


@pytest.fixture(params=[True, False], ids=["concurrent", "turns"])
def concurrent(request):
    return request.param


@pytest.fixture
def strategy_of(concurrent):
    made = []

    def make(n, **options):
        made.append(md.Strategy(f"cpu*{n}", concurrent=concurrent, **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


def replica():
    return md.get_replica_context()


# --- what a replica sees ------------------------------------------------------------------------


@pytest.mark.parametrize("n", DEVICES)
def test_each_replica_runs_once_on_a_thread_and_device_of_its_own(strategy_of, n):
    strategy = strategy_of(n)
    seen = []

    def fn():
        seen.append(
            (
                replica().replica_id,
                replica().num_replicas,
                threading.get_ident(),
                replica().device.short,
            )
        )
        assert md.get_strategy() is strategy and not md.in_cross_replica_context()
        return replica().replica_id

    result = strategy.run(fn)
    assert strategy.local_results(result) == tuple(range(n))
    assert sorted(i for i, *_ in seen) == list(range(n))
    assert {device for *_, device in seen} == {f"cpu:{i}" for i in range(n)}
    assert len({thread for _, _, thread, _ in seen}) == n
    assert threading.get_ident() not in {thread for _, _, thread, _ in seen}
    assert not md.has_strategy() and replica().replica_id == 0


def test_arguments_are_split_and_results_regrouped(strategy_of):
    strategy = strategy_of(3)
    shared = object()
    values = md.PerReplica(strategy.devices, [10, 20, 30])

    def fn(x, nested, *, key, same):
        assert same is shared
        return {"sum": x + nested["a"][0] + key, "same": same, "none": None}

    out = strategy.run(fn, values, {"a": [values]}, key=values, same=shared)
    assert out["sum"].values == (30, 60, 90) and out["same"] is shared and out["none"] is None


def test_threads_are_reused_and_state_is_not(strategy_of):
    strategy = strategy_of(2)
    local = threading.local()

    def fn():
        first = not hasattr(local, "here")
        local.here = True
        md.name_scope("left open").__enter__()  # a context that a replica forgot to leave
        return first, threading.get_ident(), md.get_replica_context().replica_id

    first, second = strategy.run(fn), strategy.run(fn)
    assert first[0].values == (True, True) and second[0].values == (False, False)
    assert set(first[1].values) == set(second[1].values) and second[2].values == (0, 1)


# --- merge_call ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", DEVICES)
def test_merge_call_runs_once_for_all_and_gives_each_its_own(strategy_of, n):
    strategy = strategy_of(n)
    calls = []

    def merge(s, values, *, word):
        calls.append(threading.get_ident())
        assert (
            s is strategy and md.in_cross_replica_context() and md.get_cross_replica_context() is s
        )
        assert word == "same"
        parts = s.local_results(values)
        return md.PerReplica(s.devices, [10 * v for v in parts]), sum(parts), "plain"

    def fn():
        i = replica().replica_id
        out = [replica().merge_call(merge, i + step, word="same") for step in range(4)]
        assert replica().replica_id == i
        return out

    result = strategy.run(fn)
    own = [
        [(10 * (i + step), sum(range(n)) + n * step, "plain") for step in range(4)]
        for i in range(n)
    ]
    per_replica = [strategy.local_results(md.select_replica(i, result)) for i in range(n)]
    assert [md.select_replica(i, result) for i in range(n)] == own, per_replica
    assert len(calls) == 4


def test_no_replica_passes_a_meeting_before_all_have_come(strategy_of):
    strategy = strategy_of(3)
    arrived = []

    def fn():
        for step in range(50):
            arrived.append(step)
            replica().merge_call(lambda s: None)
            assert arrived.count(step) == 3

    strategy.run(fn)


def test_replicas_run_at_the_same_time():
    with md.Strategy("cpu*2") as strategy:
        barrier = threading.Barrier(2, timeout=30)  # only passed when both are inside
        strategy.run(barrier.wait)


def test_strict_turns_are_in_replica_order_between_meetings():
    with md.Strategy("cpu*3", concurrent=False) as strategy:
        order = []

        def fn():
            for step in range(3):
                order.append((step, replica().replica_id))
                replica().merge_call(lambda s: order.append("merge"))
            order.append((3, replica().replica_id))

        strategy.run(fn)
    expected = [[(step, i) for i in range(3)] + ["merge"] for step in range(3)] + [
        [(3, i) for i in range(3)]
    ]
    assert order == [item for turn in expected for item in turn]


def test_a_run_nested_in_a_merge_function(strategy_of):
    strategy = strategy_of(2)

    def inner(x):
        return replica().merge_call(lambda s, x: sum(s.local_results(x)), x + replica().replica_id)

    def merge(s, x):
        return s.run(inner, x)

    def fn():
        return replica().merge_call(merge, replica().replica_id * 100)

    assert strategy.run(fn).values == (101, 101)


def test_merge_call_with_no_strategy_calls_at_once():
    def merge(s, x):
        assert md.in_cross_replica_context() and not md.has_strategy() and s is md.get_strategy()
        return x + 1

    assert replica().merge_call(merge, 1) == 2
    with pytest.raises(KeyError):
        replica().merge_call(lambda s: {}["missing"])
    assert not md.in_cross_replica_context()


# --- wrong contexts -----------------------------------------------------------------------------


def test_run_inside_a_replica_is_an_error_that_advises_merge_call(strategy_of):
    strategy = strategy_of(2)
    with pytest.raises(ContextError, match="merge_call"):
        strategy.run(lambda: strategy.run(lambda: None))


def test_merge_call_from_a_foreign_thread_is_an_error(strategy_of):
    strategy = strategy_of(2)
    errors = []

    def fn():
        context = replica()

        def foreign():
            try:
                context.merge_call(lambda s: None)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()

    strategy.run(fn)
    assert len(errors) == 2 and all("own thread" in error for error in errors)


def test_merge_call_inside_a_merge_function_is_an_error(strategy_of):
    strategy = strategy_of(2)

    def fn():
        context = replica()
        context.merge_call(lambda s: context.merge_call(lambda s: None))

    with pytest.raises(ContextError, match="not inside a merge function"):
        strategy.run(fn)


def test_strategies_do_not_mix():
    with md.Strategy("cpu*2") as one, md.Strategy("cpu*2") as other:
        with one.scope(), pytest.raises(ContextError, match="Mixing different"):
            other.run(lambda: None)
        with one.scope(), one.scope():
            assert md.get_cross_replica_context() is one
        with one.scope(), pytest.raises(ContextError, match="Mixing"), other.scope():
            pass
        assert not md.has_strategy()


def test_scopes_left_in_the_wrong_order_are_an_error():
    with md.Strategy("cpu*2") as strategy:
        scope, inner = strategy.scope(), md.device("cpu:1")
        scope.__enter__()
        inner.__enter__()
        with pytest.raises(ContextError, match="nesting error"):
            scope.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        assert md.get_cross_replica_context() is strategy
        scope.__exit__(None, None, None)
        assert not md.has_strategy()


# --- failures -----------------------------------------------------------------------------------


class Boom(Exception):
    pass


def boom():
    raise Boom("from the depth")


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("failing", ["first", "last"])
def test_a_failure_reaches_the_caller_with_its_traceback_and_the_next_run_works(
    strategy_of, n, failing
):
    strategy = strategy_of(n)
    who = 0 if failing == "first" else n - 1

    def fn():
        for step in range(3):
            if step == 1 and replica().replica_id == who:
                boom()
            replica().merge_call(lambda s: None)

    for _ in range(3):
        with pytest.raises(Boom, match="from the depth") as caught:
            strategy.run(fn)
        assert "boom" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert any(f"replica {who} of {n}" in note for note in caught.value.__notes__)
        assert strategy.local_results(strategy.run(lambda: replica().replica_id)) == tuple(range(n))


def nested_failure(where):
    def merge(s):
        if where == "merge":
            boom()
        s.run(inner)

    def inner():
        if where == "inner":
            boom()
        replica().merge_call(lambda s: boom())

    def fn():
        if where == "fn":
            boom()
        replica().merge_call(merge)

    return fn


@pytest.mark.parametrize("where", ["fn", "merge", "inner", "inner merge"])
def test_failures_of_merge_functions_and_of_nested_runs_reach_the_caller(strategy_of, where):
    strategy = strategy_of(2)
    with pytest.raises(Boom) as caught:
        strategy.run(nested_failure(where))
    assert "boom" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert strategy.local_results(strategy.run(lambda: 1.5)) != ()
    assert not md.has_strategy()


def test_when_several_fail_the_first_in_time_is_raised_and_the_others_are_notes():
    with md.Strategy("cpu*3") as strategy:
        failed = threading.Event()

        def fn():
            i = replica().replica_id
            if i == 1:
                failed.set()
                raise Boom("first in time")
            failed.wait(30)
            while not strategy_has_failed(i):
                pass
            raise ValueError(f"later, in {i}")

        def strategy_has_failed(i):
            # The failure is on record once a meeting ends this replica.
            try:
                replica().merge_call(lambda s: None)
            except BaseException:
                return True
            return False

        with pytest.raises(Boom, match="first in time") as caught:
            strategy.run(fn)
        notes = "\n".join(caught.value.__notes__)
        assert "later, in 0" in notes and "later, in 2" in notes and "replica 1 of 3" in notes


def test_a_failure_while_others_wait_ends_within_a_second(strategy_of):
    strategy = strategy_of(2)

    def fn():
        if replica().replica_id == 1:
            boom()
        replica().merge_call(lambda s: None)

    started = time.monotonic()
    with pytest.raises(Boom):
        strategy.run(fn)
    assert time.monotonic() - started < 20  # no deadline was waited for; bench/ measures the time


def test_a_replica_that_hangs_after_a_failure_is_abandoned_named_and_replaced():
    with md.Strategy("cpu*2") as strategy:
        release = threading.Event()

        def fn():
            if replica().replica_id == 1:
                boom()
            release.wait(60)

        with pytest.raises(Boom) as caught:
            strategy.run(fn)
        assert any(
            "replica 0" in note and "abandoned" in note and "release.wait" in note
            for note in caught.value.__notes__
        )
        assert strategy.run(lambda: replica().replica_id).values == (0, 1)
        release.set()
        assert strategy.run(lambda: replica().replica_id).values == (0, 1)


def test_what_an_abandoned_replica_does_later_reaches_no_run():
    with md.Strategy("cpu*2") as strategy:
        release, ended = threading.Event(), threading.Event()

        def fn():
            if replica().replica_id == 1:
                boom()
            release.wait(60)
            try:
                replica().merge_call(lambda s: None)
            finally:
                ended.set()

        with pytest.raises(Boom):
            strategy.run(fn)
        release.set()
        assert ended.wait(30)
        assert strategy.run(lambda: replica().merge_call(lambda s: "fine")) == "fine"


class NoNotes(Exception):
    def add_note(self, note):
        raise TypeError("no notes")


class NoAttributes(Exception):
    __notes__ = 3

    def __setattr__(self, name, value):
        raise AttributeError(name)


class NoText(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("where", ["replicas", "merge"])
@pytest.mark.parametrize(
    "kind",
    [
        NoNotes,
        NoAttributes,
        NoText,
        StopIteration,
        GeneratorExit,
        SystemExit,
        KeyboardInterrupt,
        MemoryError,
        RecursionError,
        BaseException,
    ],
)
def test_exceptions_of_every_kind_reach_the_caller_as_they_are(strategy_of, kind, where):
    strategy = strategy_of(3)

    def fn():
        if where == "replicas":
            raise kind
        replica().merge_call(raises)

    def raises(_):
        raise kind

    for _ in range(2):
        with pytest.raises(kind) as caught:
            strategy.run(fn)
        assert type(caught.value) is kind
    assert strategy.run(lambda: replica().replica_id).values == (0, 1, 2)


def test_an_exception_that_is_raised_again_and_again_gathers_no_notes():
    shared = Boom("made once")

    def fn():
        raise shared

    with md.Strategy("cpu*2") as strategy:
        for _ in range(5):
            with pytest.raises(Boom):
                strategy.run(fn)
    assert len(shared.__notes__) <= 2  # one for each replica that was first


def test_a_recursion_without_end_is_an_error_of_its_replica(strategy_of):
    strategy = strategy_of(2)

    def deeper(n):
        return deeper(n + 1)

    with pytest.raises(RecursionError):
        strategy.run(deeper, 0)
    assert strategy.run(lambda: replica().replica_id).values == (0, 1)


def test_several_threads_may_run_one_strategy_at_once(strategy_of):
    strategy = strategy_of(3)
    start, wrong, steps = threading.Barrier(4, timeout=60), [], []

    def work(number):
        def fn():
            i = replica().replica_id
            total = replica().merge_call(lambda s, x: sum(s.local_results(x)), number + i)
            return total, md.context.frame().step

        start.wait()
        for _ in range(50):
            total, step = strategy.run(fn)
            steps.append(step.values)
            if total.values != (3 * number + 3,) * 3:
                wrong.append(total)

    callers = [threading.Thread(target=work, args=(1000 * (n + 1),)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
    assert sorted(steps) == [(step,) * 3 for step in range(1, 201)]
    assert strategy.step == 200


def test_an_interrupt_while_jobs_are_handed_out_leaves_no_thread_behind(monkeypatch):
    with md.Strategy("cpu*3") as strategy:
        strategy.run(lambda: None)
        alive, original = threading.active_count(), pool.Worker.post
        for before in range(3):
            for after in (False, True):
                calls = iter(range(100))

                def post(worker, job, before=before, after=after, calls=calls):
                    call = next(calls)
                    if call == before and not after:
                        raise KeyboardInterrupt
                    original(worker, job)
                    if call == before:
                        raise KeyboardInterrupt

                monkeypatch.setattr(pool.Worker, "post", post)
                with pytest.raises(KeyboardInterrupt):
                    strategy.run(lambda: replica().merge_call(lambda s: None))
                monkeypatch.undo()
                for _ in range(3):
                    assert strategy.run(lambda: replica().replica_id).values == (0, 1, 2)
        assert threading.active_count() == alive


def test_an_interrupt_while_replicas_are_given_time_to_end_abandons_them(monkeypatch):
    with md.Strategy("cpu*2") as strategy:
        release = threading.Event()

        def interrupted(self):
            raise KeyboardInterrupt

        monkeypatch.setattr(run.Run, "_abandon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            strategy.run(lambda: boom() if replica().replica_id else release.wait(60))
        monkeypatch.undo()
        assert strategy.run(lambda: replica().replica_id).values == (0, 1)
        release.set()


def test_a_thread_that_is_ended_from_outside_is_an_error_and_replaced():
    with md.Strategy("cpu*2") as strategy:
        strategy.run(lambda: None)
        worker = strategy._pool._idle[1]
        worker.abandoned = True  # what is left of a thread that was killed
        worker.post(pool._end)
        worker.thread.join()
        worker.abandoned = False
        with pytest.raises(HangError, match=r"replica 1 .*ended from outside"):
            strategy.run(lambda: replica().merge_call(lambda s: None))
        assert strategy.run(lambda: replica().replica_id).values == (0, 1)


def test_threads_that_cannot_be_started_are_an_error_and_those_there_are_kept(monkeypatch):
    with md.Strategy("cpu*3") as strategy:
        started, real = [], threading.Thread.start

        def start(thread):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            strategy.run(lambda: None)
        monkeypatch.undo()
        assert strategy.run(lambda: replica().replica_id).values == (0, 1, 2)
        assert {thread.ident for thread in started} < {
            worker.thread.ident for worker in strategy._pool._idle
        }


def test_a_tape_that_a_replica_left_open_is_forgotten():
    with md.Strategy("cpu*2") as strategy:
        tapes = strategy.run(lambda: md.GradientTape().__enter__())
        x = md.constant(1.0)
        strategy.run(lambda: md.ops.square(x))
        assert all(not tape._entries for tape in tapes.values)
        assert strategy.run(lambda: len(md.tape._active.tapes)).values == (0, 0)


def test_a_strategy_that_is_forgotten_ends_its_threads_and_its_limit_of_blas():
    limits = dict(threads._replicas)

    def forgotten():
        strategy = md.Strategy("cpu*3")
        with strategy.scope():
            v = md.Variable(1.0)
        strategy.run(lambda: v.read())
        assert len(threads._replicas) == len(limits) + 1
        return [worker.thread for worker in strategy._pool._idle]

    workers = forgotten()
    gc.collect()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert threads._replicas == limits


def test_results_of_different_structure_are_an_error(strategy_of):
    strategy = strategy_of(2)
    with pytest.raises(StructureError, match="replicas 0 and 1"):
        strategy.run(lambda: [0.0] * (replica().replica_id + 1))
    assert issubclass(StructureError, ValueError)


# --- mismatches ---------------------------------------------------------------------------------


def test_another_number_of_merge_calls_names_replicas_and_lines(strategy_of):
    strategy = strategy_of(3)

    def fn():
        replica().merge_call(lambda s: None)
        if replica().replica_id != 1:
            replica().merge_call(lambda s: None)

    first = fn.__code__.co_firstlineno
    with pytest.raises(RuntimeError, match="different number of merge_calls") as caught:
        strategy.run(fn)
    text = str(caught.value)
    assert isinstance(caught.value, MergeMismatchError)
    assert "replica 1 finished" in text and "after 1" in text
    assert "replica 0 waits in merge_call number 2" in text
    assert "replica 2 waits in merge_call number 2" in text
    assert f"{__file__}:{first}" in text and f"{__file__}:{first + 3}" in text
    assert strategy.local_results(strategy.run(lambda: replica().replica_id)) == (0, 1, 2)


def test_functions_that_are_made_anew_in_each_replica_are_the_same(strategy_of):
    strategy = strategy_of(2)

    class Doubles:
        def __call__(self, s, x):
            return sum(s.local_results(x)) * 2

        def method(self, s, x):
            return self(s, x)

    def fn():
        x, meet = replica().replica_id + 0.5, replica().merge_call
        return meet(partial(Doubles(), x=x)), meet(Doubles(), x), meet(Doubles().method, x)

    assert md.select_replica(1, strategy.run(fn))[1:] == (4.0, 4.0)
    with pytest.raises(MergeMismatchError, match="different things"):
        strategy.run(lambda: replica().merge_call(max if replica().replica_id else min, 1.0))


def test_meeting_for_different_things_is_an_error(strategy_of):
    strategy = strategy_of(2)

    def fn():
        if replica().replica_id == 0:
            replica().merge_call(lambda s: "one")
        else:
            replica().merge_call(lambda s: "other")

    with pytest.raises(MergeMismatchError, match="different things"):
        strategy.run(fn)


# --- hangs --------------------------------------------------------------------------------------


def test_a_missing_replica_is_reported_then_an_error_with_its_stack(caplog):
    with md.Strategy("cpu*2", report_after=0.1, deadline=1.0) as strategy:
        release = threading.Event()

        def hangs_here():
            release.wait(60)

        def fn():
            if replica().replica_id == 1:
                hangs_here()
            replica().merge_call(lambda s: None)

        with pytest.raises(HangError) as caught:
            strategy.run(fn)
        text = str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        assert (
            "for replica 1" in text
            and "hangs_here" in text
            and "replica 0 waits in merge_call number 1" in text
        )
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "replica 1" in caplog.text
        release.set()
        assert strategy.run(lambda: replica().replica_id).values == (0, 1)


def test_a_report_on_many_replicas_names_the_first_of_each_kind():
    with md.Strategy("cpu*40", deadline=0.3) as strategy:
        release = threading.Event()
        with pytest.raises(HangError) as caught:
            strategy.run(
                lambda: (
                    release.wait(60) if replica().replica_id % 2 else replica().merge_call(print)
                )
            )
        release.set()
    text = str(caught.value)
    assert "replicas 1, 3, 5, 7, 9, 11, 13, 15 and 12 more" in text
    assert text.count("waits in merge_call") == text.count("is now at") == 8
    assert text.count("and 12 more like these") == 2


def test_long_work_without_meetings_is_no_hang():
    with md.Strategy("cpu*2", report_after=0.05, deadline=0.2) as strategy:
        again = threading.Event()
        threading.Timer(0.6, again.set).start()
        strategy.run(lambda: again.wait(30) and None)


def test_a_merge_function_that_does_not_end_is_reported_then_an_error_with_its_stack(caplog):
    with md.Strategy("cpu*2", report_after=0.1, deadline=0.5) as strategy:
        release = threading.Event()

        def hangs_here(_):
            release.wait(60)

        strategy.run(lambda: replica().merge_call(lambda s: None))
        with pytest.raises(HangError) as caught:
            strategy.run(lambda: replica().merge_call(hangs_here))
        text = str(caught.value)
        assert "for the merge function of merge_call number 1" in text
        assert "hangs_here" in text
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        release.set()
        assert strategy.run(lambda: replica().replica_id).values == (0, 1)


def test_a_run_nested_in_a_merge_function_may_take_longer_than_the_deadline():
    with md.Strategy("cpu*2", report_after=0.05, deadline=0.3) as strategy:
        done = threading.Event()
        threading.Timer(0.8, done.set).start()

        def nested(s):
            s.run(lambda: done.wait(30) and None)

        strategy.run(lambda: replica().merge_call(nested))


# --- processes ----------------------------------------------------------------------------------


def program(text):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "where",
    [
        # one waits, one computes
        "replica().merge_call(lambda s: None) if replica().replica_id else forever()",
        "replica().merge_call(lambda s: forever())",  # a merge function
        "replica().merge_call(lambda s: s.run(forever))",  # a nested run
    ],
)
def test_ctrl_c_ends_everything(where):
    process = program(f"""
        import os, threading, minidist as md
        replica = md.get_replica_context
        def forever():
            os.write(1, b"ready\\n")
            threading.Event().wait()
        md.Strategy("cpu*2").run(lambda: {where})
    """)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors and "Fatal" not in errors


def test_the_interpreter_ends_with_open_strategies_and_after_failures():
    process = program("""
        import minidist as md
        strategies = [md.Strategy(f"cpu*{n}") for n in (1, 2, 3)]
        for strategy in strategies:
            strategy.run(lambda: md.get_replica_context().merge_call(lambda s: None))
            try:
                strategy.run(lambda: 1 / md.get_replica_context().replica_id)
            except ZeroDivisionError:
                print("failed as it should")
    """)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and out.count("failed as it should") == 3 and not errors


def test_a_fork_after_the_start_is_an_error_with_a_cure():
    process = program("""
        import os, warnings
        warnings.simplefilter("ignore")         # Python 3.12 warns of forking with threads
        import minidist as md
        strategy = md.Strategy("cpu*2")
        strategy.run(lambda: None)
        child = os.fork()
        if child == 0:
            try:
                strategy.run(lambda: None)
            except md.errors.ForkError as error:
                print(error, flush=True)
                os._exit(7)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    out, errors = process.communicate(timeout=60)
    assert "spawn" in out and out.endswith("7\n"), (out, errors)
    assert issubclass(ForkError, RuntimeError) and os.getpid()


def test_a_closed_strategy_says_so_and_closing_twice_is_fine():
    strategy = md.Strategy("cpu*2")
    strategy.run(lambda: None)
    before = threading.active_count()
    strategy.close()
    strategy.close()
    assert threading.active_count() == before - 2
    with pytest.raises(ContextError, match="closed"):
        strategy.run(lambda: None)


def test_a_replica_that_hangs_in_its_turn_is_named(caplog):
    with md.Strategy("cpu*2", concurrent=False, report_after=0.1, deadline=1.0) as strategy:
        release = threading.Event()
        with pytest.raises(HangError, match=r"release\.wait"):
            strategy.run(lambda: release.wait(60) and None)
        release.set()


def test_functions_whose_call_does_nothing_yet_are_refused():
    async def coroutine():
        pass

    def generator():
        yield

    with md.Strategy("cpu*2") as strategy:
        for fn in (coroutine, generator):
            with pytest.raises(UsageError, match="generator or coroutine"):
                strategy.run(fn)
