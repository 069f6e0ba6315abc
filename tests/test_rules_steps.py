"""Rules of run_steps and its context, by number."""

from __future__ import annotations

import numpy as np
import pytest
from policies import replica_id

import minidist as md
from minidist.errors import EndOfDataError, MergeMismatchError


@pytest.fixture(params=[1, 2, 3])
def n(request):
    return request.param


@pytest.fixture
def strategy(n):
    with md.Strategy(f"cpu*{n}") as strategy:
        yield strategy


def numbers(strategy, steps):
    """Return a data set that gives replica i in step k the number n·k + i."""
    n = strategy.num_replicas
    return strategy.distribute_dataset([np.arange(n * k, n * k + n) for k in range(steps)])


def test_170_so_many_steps_run_on_consecutive_inputs(strategy, n):
    with strategy.scope():
        w = md.Variable(1.0, name="w", dtype="float64")
    optimizer = md.optim.SGD(0.25)
    seen = []

    def train(x):
        with md.GradientTape() as tape:
            loss = w * w  # so a step halves w
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return x

    def step(ctx, x):
        assert md.get_cross_replica_context() is strategy
        out = strategy.run(train, x)
        seen.append([int(part.numpy()[0]) for part in strategy.local_results(out)])

    iterator = iter(numbers(strategy, 6))
    strategy.run_steps(step, iterator)
    assert float(w.numpy()) == 0.5 and seen == [list(range(n))]
    strategy.run_steps(step, iterator, iterations=2)
    assert float(w.numpy()) == 0.125
    assert seen == [list(range(n * k, n * k + n)) for k in range(3)]
    assert strategy.run_steps(step, iterator, iterations=0).last_step_outputs == {}
    assert len(seen) == 3


def test_170_tuples_are_several_inputs_and_other_structures_are_one(strategy, n):
    x = np.zeros(n)
    got = []
    for batch in [(x, x, x), {"x": x, "y": x}, x]:
        strategy.run_steps(
            lambda ctx, *inputs: got.append(inputs), strategy.distribute_dataset([batch])
        )
    assert [len(inputs) for inputs in got] == [3, 1, 1]
    assert set(got[1][0]) == {"x", "y"}


def test_171_173_in_cross_replica_context_outputs_are_reduced_or_kept(strategy, n):
    def step(ctx, x):
        values = strategy.run(lambda x: float(x.numpy()[0]), x)
        ctx.set_last_step_output("kept", values)
        ctx.set_last_step_output("sum", values, "sum")
        ctx.set_last_step_output("mean", values, reduce_op="mean")

    outputs = strategy.run_steps(step, numbers(strategy, 5), iterations=4).last_step_outputs
    last = [3.0 * n + i for i in range(n)]
    assert list(strategy.local_results(outputs["kept"])) == last
    assert outputs["sum"] == sum(last) and outputs["mean"] == sum(last) / n


def test_172_173_in_a_replica_outputs_are_reduced_in_one_meeting(strategy, n):
    meetings = []

    def train(ctx, x):
        replica = md.get_replica_context()
        ctx.set_last_step_output("sum", x, "sum")
        ctx.set_last_step_output("mean", {"x": float(x.numpy()[0])}, reduce_op="mean")
        replica.merge_call(lambda s: meetings.append(s))

    def step(ctx, x):
        strategy.run(train, ctx, x)

    outputs = strategy.run_steps(step, numbers(strategy, 2), iterations=2).last_step_outputs
    last = [n + i for i in range(n)]
    assert outputs["sum"].numpy().tolist() == [sum(last)]
    assert outputs["mean"] == {"x": sum(last) / n}
    assert len(meetings) == 2


def test_172_in_a_replica_an_operation_is_required(strategy, n):
    def step(ctx, x):
        strategy.run(lambda: ctx.set_last_step_output("loss", 1.0))

    with pytest.raises(ValueError, match="without a reduce_op"):
        strategy.run_steps(step, numbers(strategy, 1))


def test_172_replicas_that_set_different_outputs_are_an_error():
    def step(ctx, x):
        strategy.run(lambda: ctx.set_last_step_output(f"loss_{replica_id()}", 1.0, "sum"))

    with (
        md.Strategy("cpu*2") as strategy,
        pytest.raises(MergeMismatchError, match="different names"),
    ):
        strategy.run_steps(step, numbers(strategy, 1))


def test_173_only_the_last_steps_outputs_remain(strategy, n):
    steps = iter(range(3))

    def step(ctx, x):
        assert ctx.last_step_outputs == {} == ctx.non_tensor_outputs
        k = next(steps)
        ctx.set_last_step_output(f"step {k}", k)
        ctx.set_non_tensor_output(f"note {k}", str(k))

    ctx = strategy.run_steps(step, numbers(strategy, 3), iterations=3)
    assert ctx.last_step_outputs == {"step 2": 2}
    assert ctx.non_tensor_outputs == {"note 2": "2"}


def test_174_outputs_of_any_kind_regroup_and_what_is_the_same_collapses(strategy, n):
    shared = object()

    def replica(ctx):
        ctx.set_non_tensor_output("same", {"foo": ["bar", shared]})
        ctx.set_non_tensor_output("own", [f"replica {replica_id()}"])

    def step(ctx, x):
        ctx.set_non_tensor_output("cross", whole)
        strategy.run(replica, ctx)

    whole = {"foo": md.PerReplica(None, range(n))}
    outputs = strategy.run_steps(step, numbers(strategy, 1)).non_tensor_outputs
    assert outputs["cross"] is whole
    assert outputs["same"] == {"foo": ["bar", shared]}
    assert list(strategy.local_results(outputs["own"][0])) == [f"replica {i}" for i in range(n)]


def test_175_outputs_must_be_a_dict(strategy):
    ctx = strategy.run_steps(lambda ctx, x: None, numbers(strategy, 1))
    with pytest.raises(ValueError, match="must be a dict"):
        ctx.last_step_outputs = [1, 2]
    ctx.last_step_outputs = {"a": 1}
    assert ctx.last_step_outputs == {"a": 1}
    with pytest.raises(ValueError, match="must be a dict"):
        strategy.run_steps(lambda ctx, x: None, numbers(strategy, 1), initial_loop_values=[0])


def test_176_initial_values_have_the_structure_of_what_is_set(strategy, n):
    def step(ctx, x):
        ctx.set_last_step_output("loss", {"x": x, "y": 1.0})

    def run(initial, iterations=1):
        return strategy.run_steps(step, numbers(strategy, 1), iterations, initial)

    good = {"loss": {"x": 0.0, "y": 0.0}}
    assert set(run(good).last_step_outputs["loss"]) == {"x", "y"}
    assert run(good, iterations=0).last_step_outputs == good
    for bad in ({}, {"loss": 0.0}, {"loss": {"x": 0.0}}, {**good, "more": 0.0}):
        with pytest.raises(ValueError, match="initial_loop_values must have the structure"):
            run(bad)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_177_the_end_comes_after_the_last_full_step(strategy, n, steps):
    with strategy.scope():
        w = md.Variable(0.0, name="w", aggregation=md.VariableAggregation.MEAN)

    def step(ctx, x):
        strategy.run(lambda: w.assign_add(1.0))
        ctx.set_last_step_output("w", float(w.numpy()))

    iterator = iter(numbers(strategy, steps))
    with pytest.raises(EndOfDataError, match=f"after {steps} of the 5 steps") as raised:
        strategy.run_steps(step, iterator, iterations=5)
    assert float(w.numpy()) == steps
    outputs = raised.value.context.last_step_outputs
    assert outputs == ({"w": float(steps)} if steps else {})
    assert not iterator.get_next_as_optional().has_value()

    strategy.run_steps(step, numbers(strategy, 5), iterations=5)  # and just enough is enough
    assert float(w.numpy()) == steps + 5


def test_177_an_incomplete_last_round_is_a_full_step():
    sizes = []
    with md.Strategy("cpu*2") as strategy:
        iterator = strategy.distribute_dataset([np.zeros(2), np.zeros(1)])

        def step(ctx, x):
            sizes.append(strategy.run(lambda x: x.shape[0], x))

        with pytest.raises(EndOfDataError):
            strategy.run_steps(step, iterator, iterations=3)
    assert [strategy.local_results(size) for size in sizes] == [(1, 1), (1, 0)]


def test_run_steps_says_what_it_cannot_take(strategy, n):
    for iterations in (-1, True, 1.5):
        with pytest.raises(ValueError, match="iterations must be a number"):
            strategy.run_steps(lambda ctx, x: None, numbers(strategy, 1), iterations)
    with pytest.raises(ValueError, match="distribute_dataset returns"):
        strategy.run_steps(lambda ctx, x: None, [np.zeros(2)])
    iterator = numbers(strategy, 1)
    with pytest.raises(RuntimeError, match="run_steps was called in replica"):
        strategy.run(lambda: strategy.run_steps(lambda ctx, x: None, iterator))


def test_without_a_strategy_there_are_steps_too():
    strategy = md.get_strategy()

    def step(ctx, x):
        ctx.set_last_step_output(
            "sum", strategy.run(md.ops.reduce_sum, md.select_replica(0, x)), "sum"
        )

    dataset = strategy.distribute_dataset([np.arange(3.0), np.arange(4.0)])
    ctx = strategy.run_steps(step, dataset, iterations=2)
    assert float(ctx.last_step_outputs["sum"]) == 6.0
