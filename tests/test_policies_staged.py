"""Staged variables are exactly one step old, whatever happens between two steps."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from policies import STAGING, replica_id, same_bits
from staged import Staged

import minidist as md
from minidist import context
from minidist.errors import HangError, MinidistError, UsageError

MEAN, SUM = md.VariableAggregation.MEAN, md.VariableAggregation.SUM
FIRST = md.VariableAggregation.ONLY_FIRST_REPLICA


# --- exactly one step ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", STAGING)
def test_step_t_computes_with_what_step_t_minus_2_has_left(policy, n):
    with Staged(n, policy) as staged:
        for t in range(1, 7):
            assert staged.step() == -max(t - 2, 0)
            assert float(staged.w) == -t


@pytest.mark.parametrize("n", [1, 3])
def test_areas_hold_exactly_one_item_between_steps_and_it_is_the_newest(n):
    with Staged(n) as staged:
        for _ in range(4):
            staged.step()
            assert staged.sizes == [1] * n
            for area, device in zip(
                staged.strategy.variable_mgr.read.areas, staged.strategy.devices, strict=True
            ):
                (tensor,) = area.peek(0)
                assert float(tensor) == float(staged.w)
                assert area.device is device is tensor.device


def test_all_variables_go_together_and_slots_stay_where_they_are():
    with Staged() as staged:
        v, m = staged.variable("v"), staged.variable("m", trainable=False)
        count = staged.variable("count", np.int64(0), dtype="int64", trainable=False)
        staged.optimizer = md.optim.Adam(0.1)
        staged.run(lambda: staged.apply(staged.w, v))
        for area in staged.strategy.variable_mgr.read.areas:
            assert len(area.peek(0)) == len([staged.w, v, m])
        assert staged.run(lambda: staged.optimizer.slot(v, "first").numpy()) == [
            staged.optimizer.slot(v, "first").numpy()
        ]
        assert int(count) == 0


def test_a_run_without_an_apply_reads_the_same_again():
    with Staged() as staged:
        for t in range(1, 5):
            for _ in range(2):
                assert staged.run(staged.read) == [-max(t - 2, 0)]
            assert staged.step() == -max(t - 2, 0)


def test_every_apply_is_a_step_also_of_other_variables():
    with Staged() as staged:
        v = staged.variable("v")

        def both():
            return float(staged.w.read()), float(v.read())

        seen = []
        for _ in range(3):
            seen += staged.run(both, staged.apply, both, lambda: staged.apply(v))[::2]
        # w falls in applies 1, 3, 5 and v in 2, 4, 6; each reading is two applies old
        w, v_after = [0, -1, -1, -2, -2, -3, -3], [0, 0, -1, -1, -2, -2, -3]
        assert seen == [(w[max(t - 2, 0)], v_after[max(t - 2, 0)]) for t in range(1, 7)]


def test_a_step_without_any_example_and_one_that_is_not_finite_are_none():
    with Staged() as staged:
        scale = md.optim.LossScale(1.0, automatic=True)
        staged.optimizer = md.optim.SGD(1.0, loss_scale=scale)
        nan = md.constant(np.array(np.nan))
        for t in range(1, 5):
            assert staged.step() == -max(t - 2, 0)
            staged.run(lambda: staged.optimizer.apply_gradients([(nan, staged.w)]))
            staged.run(lambda: staged.optimizer.apply_gradients([(nan, staged.w)], count=0))
            scale.value = 1.0
        assert float(staged.w) == -4


def test_newest_reads_the_variables_themselves():
    with Staged() as staged:
        for t in range(1, 5):
            staged.step()
            with context.entered(newest=True):
                assert staged.run(staged.read) == [-t]
            assert staged.run(staged.read) == [-max(t - 1, 0)]


def test_a_large_variable_is_copied_whole_while_the_next_step_runs():
    """All elements are equal: a copy that met an update would show."""
    with Staged(2, shape=(300_000,)) as staged:
        for t in range(1, 8):
            low, high = staged.run(lambda: (staged.w.numpy().min(), staged.w.numpy().max()))[0]
            assert low == high == -max(t - 2, 0)
            staged.run(staged.apply)


def test_in_the_steady_state_nothing_is_allocated(monkeypatch):
    with Staged(2, shape=(50_000,)) as staged:
        for _ in range(3):
            staged.step()
        allocated = []
        for device in staged.strategy.devices:
            monkeypatch.setattr(type(device), "allocate", lambda *given: allocated.append(given))
        staged.run(staged.apply)
        staged.run(staged.apply)
        assert not allocated


# --- what is assigned ---------------------------------------------------------------------------


def replicas_assign(v, value):
    return lambda: v.assign(md.constant(np.full(v.shape, value)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("where", ["outside", "in replicas", "in an update", "when loading"])
def test_what_is_assigned_is_read_in_this_step_and_the_next(where, n, tmp_path):
    with Staged(n) as staged:
        v = staged.variable("v", 5.0, trainable=False, aggregation=MEAN)
        for _ in range(3):
            staged.step()
        if where == "outside":
            staged.w.assign(np.float64(100))
        elif where == "in replicas":
            staged.w.aggregation = MEAN
            staged.run(replicas_assign(staged.w, 100.0))
        elif where == "in an update":
            with staged.strategy.scope():
                staged.strategy.update(staged.w, lambda w: w.assign(np.float64(100)))
        else:
            with md.Strategy("cpu*2", "replicated") as other:
                with other.scope():
                    w = md.Variable(np.float64(100), name="w")
                md.save(tmp_path / "w", w)
            md.load(tmp_path / "w", staged.w)
        assert [staged.step() for _ in range(4)] == [100, 100, 99, 98]
        assert v.numpy() == 5.0  # and no other variable has lost anything


def test_others_stay_as_old_as_they_are_when_one_is_assigned():
    with Staged() as staged:
        v = staged.variable("v")

        def step():
            return staged.run(
                lambda: (float(staged.w.read()), float(v.read())), lambda: staged.apply(staged.w, v)
            )[0]

        assert [step() for _ in range(3)] == [(0, 0), (0, 0), (-1, -1)]
        v.assign(50.0)
        assert [step() for _ in range(4)] == [(-2, 50), (-3, 50), (-4, 49), (-5, 48)]


@pytest.mark.parametrize("n", [1, 2])
def test_a_variable_that_comes_later_starts_later_and_changes_no_other(n):
    with Staged(n) as staged:
        for _ in range(3):
            staged.step()
        v = staged.variable("v", 10.0)

        def both():
            return float(staged.w.read()), float(v.read())

        seen = [staged.run(both, lambda: staged.apply(staged.w, v))[0] for _ in range(4)]
        assert seen == [(-2, 10), (-3, 10), (-4, 9), (-5, 8)]
        assert staged.sizes == [1] * n


def test_a_variable_that_goes_leaves_the_areas():
    with Staged() as staged:
        v = staged.variable("v")
        staged.optimizer = md.optim.SGD(1.0)
        staged.step()
        staged.step()
        del v
        gc.collect()
        assert [staged.step() for _ in range(3)] == [-1, -2, -3]
        assert [len(area.peek(0)) for area in staged.strategy.variable_mgr.read.areas] == [1, 1]


def test_created_in_a_replica():
    with Staged() as staged:
        made = []

        def step():
            if not made:
                v = md.Variable(np.float64(7), name="made in run")
                if replica_id() == 0:
                    made.append(v)
            return staged.read()

        assert [staged.run(step, staged.apply)[0] for _ in range(4)] == [0, 0, -1, -2]


# --- delta areas --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("policy", STAGING)
def test_what_replicas_add_and_subtract_goes_through_the_delta_area(policy, n, dtype):
    """M(t) = M(t-1) - d(t-1), and M is read as any staged variable is."""
    rng = np.random.default_rng(n)
    with Staged(n, policy) as staged:
        with staged.strategy.scope():
            start = np.asarray(rng.normal(size=3), dtype)
            m = md.Variable(start, name="m", trainable=False, aggregation=SUM)
        history, d = [start], np.zeros_like(start)
        for _ in range(5):
            minus, plus = ([np.asarray(rng.normal(size=3), dtype) for _ in range(n)] for _ in "ab")
            (read, *_) = staged.run(
                lambda: m.numpy(),
                lambda minus=minus: m.assign_sub(md.constant(minus[replica_id()])),
                lambda plus=plus: m.assign_add(md.constant(plus[replica_id()])),
                staged.apply,
            )
            assert same_bits(read, history[max(len(history) - 2, 0)])
            history.append(history[-1] - d)
            d = sum(minus[1:], minus[0]) - sum(plus[1:], plus[0])
            assert same_bits(m.numpy(), history[-1])


@pytest.mark.parametrize("n", [1, 3])
def test_moving_averages_follow_through_the_delta_area(n):
    momentum, r = 0.9, np.float32
    with Staged(n) as staged:
        with staged.strategy.scope():
            m = md.Variable(np.float32(2.0), name="m", trainable=False)
        history, d = [r(2.0)], r(0)
        rng = np.random.default_rng(1)
        for _ in range(6):
            values, counts = rng.normal(size=n).astype("f4"), list(range(1, n + 1))
            staged.run(
                lambda values=values, counts=counts: md.moving_average.assign_moving_average(
                    m, md.constant(values[replica_id()]), momentum, count=counts[replica_id()]
                ),
                staged.apply,
            )
            read = history[max(len(history) - 2, 0)]
            history.append(r(history[-1] - d))
            weighted = [v * r(c) for v, c in zip(values, counts, strict=True)]
            mean = sum(weighted[1:], weighted[0]) * r(1 / sum(counts))
            d = (read - mean) * r(1 - momentum)
            assert same_bits(m.numpy(), history[-1])


def test_one_without_zero_bias_is_written_at_once():
    """Its first updates replace the value, which cannot be done from an older one."""
    with Staged() as staged:
        with staged.strategy.scope():
            m = md.Variable(0.0, name="m", trainable=False)
            updates = md.Variable(0, name="updates", trainable=False)
        for value, right in [(4.0, 4.0), (8.0, 4.0 * 0.5 / 1.5 + 8.0 / 1.5)]:
            staged.run(
                lambda value=value: md.moving_average.assign_moving_average(
                    m, md.constant(value), 0.5, updates=updates
                ),
                staged.apply,
            )
            assert float(m) == pytest.approx(right, rel=1e-6)


def test_what_is_assigned_takes_back_what_was_on_its_way():
    with Staged() as staged:
        m = staged.variable("m", trainable=False, aggregation=MEAN)

        def add(value):
            return lambda: m.assign_add(md.constant(np.float64(value)))

        staged.step(add(1))
        staged.step(add(2))
        assert float(m) == 1
        m.assign(100.0)  # takes back the 2 that waits
        staged.step(add(4))
        assert float(m) == 100
        staged.step(add(8), replicas_assign(m, 50.0), add(16))  # takes back the 4 and the 8
        assert float(m) == 50
        staged.step()
        assert float(m) == 66
        m.assign_add(1000.0)  # outside: at once
        assert float(m) == 1066
        staged.step()
        assert float(m) == 1066


def test_what_is_trainable_or_an_integer_is_assigned_at_once():
    with Staged() as staged:
        v = staged.variable("v", aggregation=MEAN)
        with staged.strategy.scope():
            count = md.Variable(0, name="count", trainable=False, aggregation=FIRST)
        staged.run(lambda: (v.assign_sub(md.constant(np.float64(3))), count.assign_add(1)))
        assert (float(v), int(count)) == (-3, 1)
        assert staged.run(lambda: (float(v.read()), int(count.read()))) == [(-3, 1)]


# --- when something goes wrong ------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_after_an_update_that_failed_training_goes_on_from_the_variables(n, monkeypatch):
    def fail(*_, **__):
        raise OSError("once")

    with Staged(n) as staged:
        for _ in range(3):
            staged.step()
        with monkeypatch.context() as patch:
            patch.setattr(md.optim.SGD, "_update", fail)
            with pytest.raises(OSError, match="once"):
                staged.step()
        assert [staged.step() for _ in range(4)] == [-3, -3, -4, -5]
        assert staged.sizes == [1] * n


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_failure_in_an_area_ends_the_run_and_no_other(verb, monkeypatch):
    with Staged(3) as staged:
        for _ in range(3):
            staged.step()
        area = staged.strategy.variable_mgr.read.areas[1]

        def fail(*_, **__):
            raise MemoryError("no slot")

        monkeypatch.setattr(area, verb, fail)
        with pytest.raises(MemoryError, match="no slot"):
            staged.step()
        start = float(staged.w)
        assert [staged.step() for _ in range(4)] == [start, start, start - 1, start - 2]
        assert staged.sizes == [1, 1, 1]


def test_a_copy_that_fails_ends_the_run_that_waits_for_it(monkeypatch):
    """It is made on a stream's thread, where nobody is to hear of it yet."""

    def fail(*_):
        raise MemoryError("no room to copy")

    with Staged(2, shape=(50_000,)) as staged:
        staged.step()
        staged.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(type(staged.strategy.devices[0]), "copy", fail)
            staged.run(staged.apply)
            staged.synchronize()
        with pytest.raises(MemoryError, match="no room"):
            staged.step()
        assert [staged.step() for _ in range(3)] == [-2, -2, -3]


def test_a_copy_that_hangs_ends_the_run_that_waits_for_it():
    going_on = threading.Event()
    with Staged(2, shape=(50_000,), report_after=0.05, deadline=0.2) as staged:
        staged.step()
        staged.strategy.devices[1].stream("copy").submit(going_on.wait)
        try:
            staged.run(staged.apply)
            with pytest.raises(HangError):
                staged.run(staged.apply)
        finally:
            going_on.set()
        assert [staged.step() for _ in range(3)] == [-2, -2, -3]


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("replicated", {"staged_vars": True}, "staged_vars"),
        ("independent", {"staged_vars": True}, "staged_vars"),
        ("replicated", {"caching": True}, "caching"),
        ("parameter_server", {"variable_consistency": "relaxed"}, "variable_consistency"),
        ("parameter_server", {"staged_vars": True, "caching": True}, "contradict"),
    ],
)
def test_options_of_another_policy_are_refused(name, options, what):
    with pytest.raises(UsageError, match=what):
        md.Strategy("cpu*2", name, **options)


def test_closing_a_strategy_frees_its_areas():
    staged = Staged()
    staged.step()
    read = staged.strategy.variable_mgr.read
    staged.strategy.close()
    staged.strategy.close()
    assert read.areas == []
    with pytest.raises(MinidistError):
        staged.step()
