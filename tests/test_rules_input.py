"""Rules of distributed input, by number: input contexts, what each replica gets, and the end."""

from __future__ import annotations

import re
from functools import partial
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist.errors import EndOfDataError, StructureError
from minidist.input import DistributedDataset, Share, deal


@pytest.fixture(params=[1, 2, 3, 5])
def n(request):
    return request.param


@pytest.fixture
def strategy(n):
    with md.Strategy(f"cpu*{n}") as strategy:
        yield strategy


def lists(batch):
    """Return what each replica has of a batch that is one PerReplica."""
    return [part.numpy().tolist() for part in md.local_results(batch)]


def batches(examples, size):
    """Return range(examples) in batches of at most `size`."""
    return [np.arange(a, min(a + size, examples)) for a in range(0, examples, size)]


def rounds(examples, size, n):
    """Return the same batches as lists, dealt to n replicas."""
    elements = [batch.tolist() for batch in batches(examples, size)]
    return [list(row) for row in zip_longest(*[iter(elements)] * n, fillvalue=[])]


# --- input contexts -----------------------------------------------------------------------------


def test_024_an_input_context_divides_a_batch_evenly():
    ctx = md.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert ctx.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="13 cannot be divided evenly among 6"):
        ctx.get_per_replica_batch_size(13)


def test_025_an_unknown_replication_mode_is_an_error(strategy):
    with pytest.raises(ValueError, match="'per_worker' or 'per_replica', not 'per_planet'"):
        strategy.make_input_fn_iterator(lambda ctx: [], "per_planet")


# --- who gets what ------------------------------------------------------------------------------


def test_178_consecutive_elements_go_to_consecutive_replicas(strategy, n):
    contexts = []

    def input_fn(ctx):
        contexts.append(ctx)
        return range(4 * n)  # numbers: an element need not be a batch

    iterator = strategy.make_input_fn_iterator(input_fn)
    for step in range(4):
        assert lists(iterator.get_next()) == list(range(step * n, step * n + n))
    with pytest.raises(EndOfDataError, match="no more batches"):
        iterator.get_next()
    assert contexts == [md.InputContext(1, 0, n)]


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def test_179_a_data_set_of_structures_gives_structures_of_values_per_replica(strategy, n):
    x, y = np.arange(2.0 * n), np.arange(2 * n) ** 2
    for element in [(x, y), [x, y], Pair(x, y), {"x": x, "y": (y, None)}]:
        (batch,) = strategy.distribute_dataset([element])
        assert type(batch) is type(element)
        first, second = batch.values() if isinstance(batch, dict) else batch
        second = second[0] if isinstance(element, dict) else second
        assert isinstance(first, md.PerReplica) and isinstance(second, md.PerReplica)
        assert lists(first) == x.reshape(n, 2).tolist()
        assert lists(second) == y.reshape(n, 2).tolist()


def test_180_beginning_anew_restarts_from_the_beginning(strategy, n):
    for dataset in (
        strategy.distribute_dataset([np.full(n, i) for i in range(3)]),
        strategy.make_input_fn_iterator(
            lambda ctx: [np.full(1, i) for i in range(3) for _ in range(n)]
        ),
    ):
        for _ in range(2):
            assert [lists(batch) for batch in dataset] == [[[i]] * n for i in range(3)]
        for _ in range(2):
            assert [lists(dataset.get_next()) for _ in range(3)] == [[[i]] * n for i in range(3)]
            with pytest.raises(EndOfDataError):
                dataset.get_next()
            dataset.close()


def test_181_182_184_185_the_last_round_is_short_and_then_empty(strategy, n):
    for examples in (8, 9, 10):
        iterator = strategy.make_input_fn_iterator(lambda ctx, e=examples: batches(e, 2))
        got = []
        while (batch := iterator.get_next_as_optional()).has_value():
            got.append(lists(batch.get_value()))
        assert got == rounds(examples, 2, n)  # the incomplete round too
        assert not iterator.get_next_as_optional().has_value()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_183_drop_remainder_leaves_the_short_round_out(strategy, n, prefetch):
    iterator = strategy.make_input_fn_iterator(
        lambda ctx: batches(21, 2), prefetch=prefetch, drop_remainder=True
    )
    assert [lists(batch) for batch in iterator] == rounds(21, 2, n)[: 21 // (2 * n)]
    source = [np.arange(2 * n), np.arange(2 * n - 1), np.arange(2 * n)]
    dataset = strategy.distribute_dataset(source, drop_remainder=True, prefetch=prefetch)
    assert [sum(map(len, lists(batch))) for batch in dataset] == [2 * n, 2 * n]


def test_184_a_replica_without_data_gets_zeros_without_examples():
    element = {"image": np.ones((2, 4, 3), np.float32), "label": np.ones(2, np.int64), "step": 7}
    with md.Strategy("cpu*3") as strategy:
        (batch,) = strategy.make_input_fn_iterator(lambda ctx: [element])
        for replica in (1, 2):
            dummy = md.select_replica(replica, batch)
            assert dummy["image"].shape == (0, 4, 3) and dummy["image"].dtype == np.float32
            assert dummy["label"].shape == (0,) and dummy["label"].dtype == np.int64
            assert dummy["step"].shape == () and int(dummy["step"]) == 0
            assert dummy["image"].device.short == f"cpu:{replica}"


def test_185_186_pipelines_of_different_length_go_on_until_all_are_empty(strategy, n):
    # Replica i's own pipeline has i batches, of one example more than that of the replica before.
    def input_fn(ctx):
        assert ctx.num_input_pipelines == ctx.num_replicas_in_sync == n
        i = ctx.input_pipeline_id
        return [np.full(i + 1, 10 * i + k) for k in range(i)]

    got = [lists(batch) for batch in strategy.make_input_fn_iterator(input_fn, "per_replica")]
    assert got == [
        [[10 * i + k] * (i + 1) if k < i else [] for i in range(n)] for k in range(n - 1)
    ]


def test_185_186_several_replicas_may_share_each_of_several_pipelines():
    # Two pipelines, each for two of four replicas: one has 5 elements, the other 2.
    devices = md.devices("cpu*4")
    sources = [batches(5, 1), [np.full((2, 3), 7.0)] * 2]
    dataset = DistributedDataset(
        sources,
        partial(deal, Share.whole(4), "join"),
        devices,
        lambda: (5.0, 60.0),
        prefetch=1,
        drop_remainder=False,
    )
    twos = [[7.0] * 3] * 2
    assert [lists(batch) for batch in dataset] == [
        [[0], [1], twos, twos],
        [[2], [3], [], []],
        [[4], [], [], []],
    ]
    *_, last = dataset
    assert [part.shape for part in last.values] == [(1,), (0,), (0, 3), (0, 3)]


def test_187_an_optional_without_a_value_ends_the_loop_and_cannot_be_read(strategy, n):
    dataset = strategy.distribute_dataset([np.ones(n)] * 2)
    total = 0.0
    while (optional := dataset.get_next_as_optional()).has_value():
        total += float(strategy.reduce("sum", optional.get_value(), axis=0))
    assert total == 2 * n
    with pytest.raises(ValueError, match="there is no batch here"):
        optional.get_value()


@given(st.integers(0, 40), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_188_a_global_batch_is_split_evenly(examples, n):
    with md.Strategy(f"cpu*{n}") as strategy:
        (batch,) = strategy.distribute_dataset([np.arange(examples)])
        parts = lists(batch)
    assert list(chain(*parts)) == list(range(examples))
    assert [len(part) for part in parts] == [(examples + n - 1 - i) // n for i in range(n)]


def test_188_a_data_set_without_batches_is_an_error(strategy):
    for element in (3.0, (np.zeros(2), 1.0)):
        with pytest.raises(ValueError, match="same first dimension"):
            strategy.distribute_dataset([element]).get_next()


# --- pipelines ----------------------------------------------------------------------------------


def test_189_shards_are_disjoint_and_without_them_all_see_the_same(strategy, n):
    source = range(10)

    def sharded(ctx):
        return md.shard(source, ctx.num_input_pipelines, ctx.input_pipeline_id)

    seen = [set() for _ in range(n)]
    rows = 0
    for batch in strategy.make_input_fn_iterator(sharded, "per_replica"):
        for i in range(n):
            if rows * n + i < 10:
                seen[i].add(int(md.select_replica(i, batch)))
        rows += 1
    assert rows == -(-10 // n)
    assert sorted(value for part in seen for value in part) == list(source)
    assert sum(map(len, seen)) == 10

    same = strategy.make_input_fn_iterator(lambda ctx: source, "per_replica")
    assert [lists(batch) for batch in same] == [[value] * n for value in source]


@given(st.integers(0, 30), st.integers(1, 6))
def test_189_shards_are_a_partition(length, num_shards):
    shards = [md.shard(range(length), num_shards, i) for i in range(num_shards)]
    for _ in range(2):  # they can be read again
        assert [list(shard) for shard in shards] == [
            [value for value in range(length) if value % num_shards == i] for i in range(num_shards)
        ]


def test_190_what_an_input_pipeline_cannot_be_made_of_is_an_error(strategy, n):
    with pytest.raises(ValueError, match="must return an iterable"):
        strategy.make_input_fn_iterator(lambda ctx: 3)
    for wrong in [(0, 0, n), (n + 1, 0, n), (1, 1, n), (1, -1, n), (1, 0, 0)]:
        with pytest.raises(ValueError, match="pipeline"):
            md.InputContext(*wrong)
    for index in (-1, n):
        with pytest.raises(ValueError, match=f"shard {index} is none of {n}"):
            md.shard([], n, index)
    with pytest.raises(ValueError, match="devices"):
        md.Strategy([])


def test_190_an_input_function_may_return_a_function(strategy, n):
    def input_fn(ctx):
        numbers = iter(range(2 * n + 1))
        return lambda: np.full(1, next(numbers))

    got = [lists(batch) for batch in strategy.make_input_fn_iterator(input_fn)]
    assert got == rounds(2 * n + 1, 1, n)


def test_190_elements_of_one_round_must_have_one_structure():
    with md.Strategy("cpu*2") as strategy:
        for a, b in [({"a": 1}, {"b": 1}), ((1, 2), (1,)), ((1, None), (1, 2))]:
            with pytest.raises(StructureError, match="elements of one round differ"):
                strategy.make_input_fn_iterator(lambda ctx, row=(a, b): row).get_next()
        one = strategy.make_input_fn_iterator(
            lambda ctx: [{"a": 1, "b": None}, {"b": None, "a": 2}]
        )
        batch = one.get_next()
        assert lists(batch["a"]) == [1, 2] and batch["b"] is None


# --- replicas compute ---------------------------------------------------------------------------


def test_191_replicas_compute_with_the_true_sizes_of_their_parts(strategy, n):
    def step(x):
        return x.shape[0], float(md.ops.reduce_mean(x))

    for examples in (n, n + 1, 2 * n + 1):
        (batch,) = strategy.distribute_dataset([np.arange(float(examples))])
        parts = np.array_split(np.arange(float(examples)), n)  # larger parts first, as ours
        assert [md.select_replica(i, strategy.run(step, batch)) for i in range(n)] == [
            (len(part), part.mean()) for part in parts
        ]


def test_192_with_less_examples_than_replicas_all_run_and_outputs_regroup(strategy, n):
    def step(x):
        return {"sum": md.ops.reduce_sum(x), "size": float(x.shape[0]), "same": "yes"}

    (batch,) = strategy.distribute_dataset([np.full((1, 3), 2.0)])
    out = strategy.run(step, batch)
    assert out["same"] == "yes"
    assert [md.select_replica(i, out)["size"] for i in range(n)] == [1.0] + [0.0] * (n - 1)
    assert float(strategy.reduce("sum", out["sum"])) == 6.0


def test_193_with_drop_remainder_the_last_replica_may_get_nothing():
    source = [np.arange(2.0), np.arange(2.0), np.arange(1.0)]
    with md.Strategy("cpu*3") as strategy:
        dataset = strategy.distribute_dataset(source, drop_remainder=True)
        for batch in dataset:
            assert lists(batch) == [[0.0], [1.0], []]
            assert strategy.run(lambda x: x.shape[0], batch).values == (1, 1, 0)
        assert dataset.reduce(0, lambda count, batch: count + 1) == 2


def test_194_summing_to_the_end_gives_the_full_total(strategy, n):
    data = np.arange(23.0)
    parts = [data[a : a + 4] for a in range(0, 23, 4)]
    total = 0.0
    for batch in strategy.distribute_dataset(parts):
        total += float(strategy.reduce("sum", strategy.run(md.ops.reduce_sum, batch)))
    assert total == data.sum()

    def add(state, batch):
        return state + float(strategy.reduce("sum", batch, axis=0))

    assert strategy.distribute_dataset(parts).reduce(0.0, add) == data.sum()


def test_195_break_and_return_leave_a_loop_over_a_data_set(strategy, n):
    dataset = strategy.distribute_dataset([np.full(n, i) for i in range(5)])

    def first_above(limit):
        for batch in dataset:
            if int(md.local_results(batch)[0].numpy()[0]) > limit:
                return lists(batch)

    assert first_above(2) == [[3]] * n
    seen = []
    for batch in dataset:
        seen.append(lists(batch))
        if len(seen) == 2:
            break
    assert seen == [[[0]] * n, [[1]] * n]


def test_196_elements_are_on_the_replicas_devices_when_they_are_handed_out(strategy, n):
    for batch in strategy.distribute_dataset([np.arange(2.0 * n)] * 3):
        for i, device in enumerate(strategy.devices):
            part = md.select_replica(i, batch)
            assert part.device is device and part.numpy().tolist() == [2 * i, 2 * i + 1]
        at_home = strategy.run(lambda x: x.device is md.get_replica_context().device, batch)
        assert all(strategy.local_results(at_home))


def test_197_an_iterator_for_other_devices_is_an_error(n):
    with md.Strategy(f"cpu*{n}") as strategy, md.Strategy(f"cpu*{n + 1}") as other:
        iterator = other.distribute_dataset([np.zeros(6)])
        with pytest.raises(ValueError, match=re.escape(f"cpu:{n}")):
            strategy.run_steps(lambda ctx, x: None, iterator)
        with pytest.raises(ValueError, match="one for each"):
            md.PerReplica(strategy.devices, [0] * (n + 1))


def test_198_batches_are_split_as_they_come_whatever_was_done_to_them(strategy, n):
    batched = (np.arange(a, a + 2 * n + 1) for a in (0, 100))
    mapped = ({"x": x, "twice": [2.0 * x]} for x in batched)
    for a, batch in zip((0, 100), strategy.distribute_dataset(mapped), strict=True):
        assert [len(part) for part in lists(batch["x"])] == [3] + [2] * (n - 1)
        assert list(chain(*lists(batch["twice"][0]))) == [2.0 * x for x in range(a, a + 2 * n + 1)]
