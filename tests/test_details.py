"""Details that are promised and easily lost: orders of sums, and who is left out of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from policies import replica_id
from states import state_dict

import minidist as md
from minidist import context
from minidist.tensor import Tensor

# Three float32 numbers whose sum depends on the order: (A + B) + C is 1, C first gives 0.
A, B, C = np.float32(1e8), np.float32(-1e8), np.float32(1.0)
IN_ORDER, REVERSED = (A + B) + C, (C + B) + A


@pytest.fixture
def strategy():
    with md.Strategy("cpu*3") as strategy:
        yield strategy


def test_the_numbers_tell_orders_apart():
    assert (float(IN_ORDER), float(REVERSED)) == (1.0, 0.0)


def test_on_read_variables_are_summed_in_replica_order(strategy):
    with strategy.scope():
        v = md.Variable(
            np.float32(0),
            synchronization=md.VariableSynchronization.ON_READ,
            aggregation=md.VariableAggregation.SUM,
        )
    strategy.run(lambda: v.assign([A, B, C][replica_id()]))
    assert v.numpy() == IN_ORDER


@pytest.mark.parametrize("policy", ["replicated", "parameter_server"])
def test_rows_that_replicas_share_are_summed_in_replica_order(policy):
    with md.Strategy("cpu*3", variable_update=policy) as strategy:
        with strategy.scope():
            v = md.Variable(np.zeros((2, 1), np.float32))
        optimizer = md.optim.SGD(1.0)
        optimizer.lr = -3.0  # so that the weight is the sum

        def step():
            row = md.constant(np.array([[[A, B, C][replica_id()]]], np.float32))
            slices = md.IndexedSlices(row, md.constant(np.array([1])), (2, 1))
            optimizer.apply_gradients([(slices, v)])

        strategy.run(step)
        third = np.float32(1 / 3)
        assert v.numpy().tolist() == [[0.0], [float(np.float32(3) * (IN_ORDER * third))]]


def test_moving_averages_leave_out_whoever_has_no_example_nans_and_all(strategy):
    with strategy.scope():
        v = md.Variable(np.float32(0))
    strategy.run(
        lambda: md.assign_moving_average(
            v,
            np.float32([2.0, 4.0, np.nan][replica_id()]),
            0.5,
            count=[3, 1, 0][replica_id()],
        )
    )
    assert v.numpy() == 0.5 * (3 * 2.0 + 1 * 4.0) / 4


def test_rounds_are_as_large_as_the_first_and_not_as_the_largest(strategy):
    batches = [np.zeros(6), np.zeros(9), np.zeros(7), np.zeros(5), np.zeros(6)]
    sizes = [
        sum(len(part) for part in batch.values)
        for batch in strategy.distribute_dataset(batches, drop_remainder=True)
    ]
    assert sizes == [6, 9, 7, 6]


def test_an_array_that_replicas_share_is_padded_on_each_ones_device(strategy):
    shared = np.ones(2)
    x = md.PerReplica(strategy.devices, [shared, shared, np.ones(3)])
    padded = md.pad(x)
    devices = strategy.run(lambda x: x.value.device.short, padded)
    assert devices.values == ("cpu:0", "cpu:1", "cpu:2")


def test_set_strategy_goes_on_in_the_random_numbers(strategy):
    md.random.seed(3)
    first = context.draw(1)
    md.set_strategy(strategy)
    second = context.draw(1)
    md.set_strategy(None)
    third = context.draw(1)
    assert len({first, second, third}) == 3


def test_a_group_waits_for_the_devices_of_its_components(strategy):
    gate, done = threading.Event(), threading.Event()
    device = strategy.devices[2]
    device.stream("copy").submit(lambda: gate.wait(60))
    value = {"x": md.PerReplica(strategy.devices, [1, 2, Tensor(device.copy_in([1.0]), device)])}

    def wait():
        strategy.group(value)
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not done.wait(0.2)  # a group that waits is never done by now
    gate.set()
    waiting.join(60)
    assert done.is_set()


def test_each_thread_draws_its_own_random_numbers():
    md.random.seed(5)
    here = [context.draw(1), context.draw(1)]
    there = []
    thread = threading.Thread(target=lambda: there.append(context.draw(1)))
    thread.start()
    thread.join(60)
    assert there == here[:1] and here[0] != here[1]


def test_a_reduction_of_leaves_with_one_and_with_several_components(strategy):
    parts = [md.constant(np.float32([i, 2 * i])) for i in (1, 2, 3)]
    with md.device("cpu:0"):
        alone = md.constant(np.float32([5, 7]))
    total = strategy.reduce(
        "mean",
        [md.PerReplica(strategy.devices, parts), md.Mirrored(strategy.devices[:1], [alone])],
        destinations="cpu:0",
    )
    assert [leaf.numpy().tolist() for leaf in total] == [[2, 4], [5, 7]]


def test_a_copy_beyond_those_that_were_saved_is_unexpected(tmp_path):
    path = tmp_path / "file"
    with md.Strategy("cpu*2", variable_update="independent") as strategy:
        with strategy.scope():
            v = md.Variable(1.0, name="w")
        md.save(path, v)
        state = state_dict([v])
        assert sorted(state) == ["w", "w/replica_1"]
        more = md.Variable(1.0, name="w/replica_7")
        md.save(tmp_path / "more", [more])
        keys = md.load(tmp_path / "more", v, strict=False)
        assert (list(keys.missing), list(keys.unexpected)) == (["w"], ["w/replica_7"])
