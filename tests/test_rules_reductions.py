"""Rules 140 to 169: reductions to destinations, and updates of each copy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from policies import POLICIES, same_bits

import minidist as md
from minidist import comm
from minidist.errors import ContextError, ShapeError

COUNTS = (1, 2, 3, 5)
PACKINGS = [
    {},
    {"gradient_repacking": 1},
    {"gradient_repacking": 8},
    {"agg_small_grads_max_bytes": 24},
    {"agg_small_grads_max_bytes": 1 << 20, "agg_small_grads_max_group": 2},
]
DTYPES = ["float32", "float64", "int32", "int64", "bool"]


@pytest.fixture(scope="module")
def strategies():
    """Return a function from the number of replicas, policy and options to an open strategy."""
    known = {}

    def strategy(n, policy="replicated", **options):
        key = (n, policy, *sorted(options.items()))
        if key not in known:
            name, policy_options = POLICIES[policy]
            known[key] = md.Strategy(f"cpu*{n}", name, **policy_options, **options)
        return known[key]

    yield strategy
    for each in known.values():
        each.close()


def per_replica(strategy, arrays):
    """Return Tensors, each on its replica's device."""
    tensors = []
    for device, array in zip(strategy.devices, arrays, strict=True):
        with md.device(device):
            tensors.append(md.constant(array))
    return md.PerReplica(strategy.devices, tensors)


def names(value):
    """Return the short names of a result's devices, having checked that its tensors are there."""
    parts = md.local_results(value)
    devices = value.devices if isinstance(value, md.Mirrored) else (value.device,)
    assert [part.device for part in parts] == list(devices)
    return [device.short for device in devices]


def counting(n, dtype="float64"):
    """Return [1, 2], [10, 20], [100, 200], … for n replicas."""
    return [np.array([1, 2], dtype) * 10**i for i in range(n)]


def ones(n):
    return int("1" * n)


# --- reduce to destinations -----------------------------------------------------------------------


DESTINATIONS = {
    "none": lambda strategy, variable: (None, [device.short for device in strategy.devices]),
    "string": lambda strategy, variable: ("/device:CPU:6", ["cpu:6"]),
    "own": lambda strategy, variable: ("cpu:0", ["cpu:0"]),
    "strings": lambda strategy, variable: ("cpu:6,7", ["cpu:6", "cpu:7"]),
    "list": lambda strategy, variable: (["cpu:6", "host", "cpu:6"], ["cpu:6", "host"]),
    "device": lambda strategy, variable: (strategy.devices[-1], [strategy.devices[-1].short]),
    "variable": lambda strategy, variable: (
        variable,
        [copy.device.short for copy in variable.copies],
    ),
    "mirrored": lambda strategy, variable: (
        md.Mirrored(md.devices("cpu:4,5"), [0, 0]),
        ["cpu:4", "cpu:5"],
    ),
    "tensor": lambda strategy, variable: (md.constant(0.0), ["cpu:0"]),
}


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("where", DESTINATIONS)
@pytest.mark.parametrize("n", COUNTS)
def test_140_reduce_to_destinations(strategies, n, where, packing):
    """The right value on exactly those devices, whatever the packing."""
    strategy = strategies(n, **packing)
    with strategy.scope():
        variable = md.Variable(0.0)
    destinations, expected = DESTINATIONS[where](strategy, variable)
    value = {"a": per_replica(strategy, counting(n)), "b": per_replica(strategy, counting(n, "f4"))}
    for op, factor in (("sum", 1), ("mean", 1 / n)):
        result = strategy.reduce(op, value, destinations=destinations)
        for leaf, dtype in ((result["a"], np.float64), (result["b"], np.float32)):
            assert names(leaf) == expected
            assert isinstance(leaf, md.Mirrored if len(expected) > 1 else md.Tensor)
            for part in md.local_results(leaf):
                right = np.array([ones(n), 2 * ones(n)], dtype) * dtype(factor)
                assert same_bits(part.numpy(), right)


@pytest.mark.parametrize("policy", POLICIES)
def test_140_a_variable_is_a_destination_under_every_policy(strategies, policy):
    strategy = strategies(2, policy)
    with strategy.scope():
        variable = md.Variable(np.zeros(2), name="v")
    total = strategy.reduce("sum", per_replica(strategy, counting(2)), destinations=variable)
    assert names(total) == [copy.device.short for copy in variable.copies]
    strategy.update(variable, lambda v, x: v.assign(x), total)
    for copy in variable.copies:
        np.testing.assert_array_equal(copy.array, [11, 22])


@st.composite
def batches(draw):
    """Return (n, [(arrays of n replicas, destination, its devices)])."""
    n = draw(st.sampled_from(COUNTS))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        dtype = draw(st.sampled_from(DTYPES))
        arrays = [np.asarray(random.normal(size=shape) * 100, dtype) for _ in range(n)]
        own = [f"cpu:{i}" for i in range(n)]
        wanted = draw(
            st.sampled_from([(None, own), ("cpu:6", ["cpu:6"]), (["host", "cpu:1"],) * 2])
        )
        pairs.append((arrays, *wanted))
    return n, pairs


def added(op, arrays):
    """Return the sum or mean as decision 1 and 5 say, by a plain loop."""
    arrays = [array.astype(np.int64) if array.dtype == bool else array for array in arrays]
    total = arrays[0]
    for array in arrays[1:]:
        total = np.asarray(total + array)
    if op == "sum":
        return total
    if total.dtype.kind == "i":
        total = total.astype(np.float64)
    return np.asarray(total * total.dtype.type(1 / len(arrays)))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), op=st.sampled_from(["sum", "mean"]))
@example(batch=(2, [([np.ones((0, 3))] * 2, None, ["cpu:0", "cpu:1"])]), op="mean")
def test_141_batch_reduce_is_reduce_of_each_in_order(strategies, packing, batch, op):
    """Any shapes, dtypes, counts and destinations, bit for bit."""
    n, pairs = batch
    strategy = strategies(n, **packing)
    values = [(per_replica(strategy, arrays), wanted) for arrays, wanted, _ in pairs]
    results = strategy.batch_reduce(op, values)
    assert len(results) == len(pairs)
    for (value, wanted), (arrays, _, devices), result in zip(values, pairs, results, strict=True):
        assert names(result) == devices
        alone = strategy.reduce(op, value, destinations=wanted)
        for part, other in zip(md.local_results(result), md.local_results(alone), strict=True):
            assert same_bits(part.numpy(), added(op, arrays))
            assert same_bits(other.numpy(), part.numpy())


def test_141_one_pass_for_each_place(strategies, monkeypatch):
    strategy = strategies(2)
    rows = []
    real = comm.Communicator.all_reduce

    def noting(self, sources, destinations, *args, **kwargs):
        rows.append((len(sources[0]), len(destinations)))
        real(self, sources, destinations, *args, **kwargs)

    monkeypatch.setattr(comm.Communicator, "all_reduce", noting)
    values = [per_replica(strategy, [np.full(i, 1.0)] * 2) for i in range(5)]
    places = [None, "cpu:7", None, "cpu:7", None]
    results = strategy.batch_reduce("mean", zip(values, places, strict=True))
    assert rows == [(3, 2), (2, 1)]
    assert [np.asarray(result).size for result in results] == [0, 1, 2, 3, 4]
    assert strategy.batch_reduce("sum", []) == []


def test_142_broadcast_puts_a_copy_on_each_destination(strategies):
    for n in COUNTS:
        strategy = strategies(n)
        everywhere = [device.short for device in strategy.devices]
        array = np.arange(3.0)
        with strategy.scope():
            variable = md.Variable(array)
        on_last = per_replica(strategy, [array] * n).values[-1]
        mirrored = md.Mirrored(md.devices("cpu:0,7"), [md.constant(array), md.constant(array)])
        for value in (array, md.constant(array), on_last, variable, mirrored):
            for destinations, expected in (
                (None, everywhere),
                (["cpu:6", "cpu:7"], ["cpu:6", "cpu:7"]),
                ("host", ["host"]),
            ):
                result = strategy.broadcast({"x": [value]}, destinations)["x"][0]
                assert names(result) == expected
                for part in md.local_results(result):
                    assert same_bits(part.numpy(), array)
        result = strategy.broadcast(variable)
        variable.assign(array + 1)  # the copies are copies
        assert same_bits(md.local_results(result)[0].numpy(), array)


def test_142_broadcast_of_what_has_no_one_value(strategies):
    strategy = strategies(2)
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.broadcast(per_replica(strategy, counting(2)))
    with pytest.raises(ValueError, match="text"):
        strategy.broadcast("text")


@pytest.mark.parametrize("nothing", [[], (), "", [[]]])
def test_143_empty_destinations(strategies, nothing):
    strategy = strategies(2)
    value = per_replica(strategy, counting(2))
    for call in (
        lambda: strategy.reduce("sum", value, destinations=nothing),
        lambda: strategy.reduce("mean", 1.0, destinations=nothing),
        lambda: strategy.batch_reduce("sum", [(value, nothing)]),
        lambda: strategy.broadcast(1.0, nothing),
    ):
        with pytest.raises(ValueError, match="device"):
            call()


@pytest.mark.parametrize(
    "unusable",
    [3, object(), {"a": "cpu:0"}, "tpu:0", "worker:1/cpu:0", md.PerReplica(None, [1, 2])],
    ids=str,
)
def test_143_unusable_destinations(strategies, unusable):
    strategy = strategies(2)
    with pytest.raises(ValueError, match=r"destination|device"):
        strategy.reduce("sum", per_replica(strategy, counting(2)), destinations=unusable)


@pytest.mark.parametrize(
    "value", ["text", b"bytes", None, object(), np.array("text"), 1j * np.ones(1)]
)
def test_143_unusable_values(strategies, value):
    strategy = strategies(2)
    with pytest.raises(ValueError, match="not a number"):
        strategy.reduce("mean", value)
    with pytest.raises(ValueError, match="replica 1"):
        strategy.reduce("sum", md.PerReplica(strategy.devices, [np.ones(1), value]))


@pytest.mark.parametrize(
    "op", ["sum", "SUM", "Sum", md.ReduceOp.SUM, "mean", "MEAN", md.ReduceOp.MEAN]
)
def test_144_the_operation_in_any_case(strategies, op):
    strategy = strategies(2)
    value = per_replica(strategy, counting(2))
    mean = op is md.ReduceOp.MEAN or str(op).lower() == "mean"
    right = np.array([11.0, 22.0]) / (2 if mean else 1)
    np.testing.assert_array_equal(strategy.reduce(op, value), right)
    np.testing.assert_array_equal(strategy.batch_reduce(op, [(value, "cpu:1")])[0], right)


@pytest.mark.parametrize(
    "op", [md.VariableAggregation.SUM, md.VariableAggregation.MEAN, "max", "", None, 1]
)
def test_144_anything_else_is_an_error(strategies, op):
    strategy = strategies(2)
    for call in (
        lambda: strategy.reduce(op, per_replica(strategy, counting(2))),
        lambda: strategy.batch_reduce(op, []),
    ):
        with pytest.raises(ValueError, match=r"ReduceOp\.SUM"):
            call()


def test_145_mirrored_is_its_own_mean_and_has_no_sum(strategies):
    for n in COUNTS:
        strategy = strategies(n)
        mirrored = md.Mirrored(strategy.devices, per_replica(strategy, [np.ones(2)] * n).values)
        assert strategy.reduce("mean", mirrored) is mirrored
        moved = strategy.reduce("mean", mirrored, destinations=["cpu:0", "cpu:7"])
        assert names(moved) == ["cpu:0", "cpu:7"]
        np.testing.assert_array_equal(moved, [1, 1])
        if n > 1:
            with pytest.raises(ValueError, match="sum is not defined"):
                strategy.reduce("sum", mirrored)
        whole = md.Mirrored(strategy.devices, [md.constant(np.array([3, 4]))] * n)
        assert same_bits(strategy.reduce("mean", whole), np.array([3.0, 4.0]))  # decision 5
        assert same_bits(strategy.reduce("mean", whole, axis=0), np.asarray(3.5))


@pytest.mark.parametrize("n", COUNTS)
def test_145_a_variable_is_its_own_mean(strategies, n):
    strategy = strategies(n)
    with strategy.scope():
        variable = md.Variable([1.0, 2.0])
        own = md.Variable(
            1.0,
            synchronization=md.VariableSynchronization.ON_READ,
            aggregation=md.VariableAggregation.SUM,
        )
    assert strategy.reduce("mean", variable) is variable
    np.testing.assert_array_equal(strategy.reduce("mean", variable, axis=0), 1.5)
    if n > 1:
        with pytest.raises(ValueError, match="sum is not defined"):
            strategy.reduce("sum", variable)
    # One that is synchronized on read differs between replicas.
    strategy.run(lambda: own.assign(md.get_replica_context().replica_id + 1.0))
    assert float(strategy.reduce("sum", own)) == n * (n + 1) / 2
    assert float(strategy.reduce("mean", own)) == (n + 1) / 2


def test_145_a_variable_of_independent_replicas_has_a_mean(strategies):
    """Its copies are the replicas' own."""
    strategy = strategies(2, "independent")
    with strategy.scope():
        variable = md.Variable(0.0)
    for i, copy in enumerate(variable.copies):
        copy.array[...] = i + 1
    assert names(strategy.reduce("mean", variable)) == ["cpu:0", "cpu:1"]
    assert float(strategy.reduce("mean", variable)) == 1.5
    assert float(strategy.reduce("sum", variable)) == 3
    doubled = strategy.update(variable, lambda v: v * 2.0, group=False)
    assert isinstance(doubled, md.PerReplica)
    assert [float(part) for part in doubled.values] == [2, 4]


def test_146_plain_values(strategies):
    tensor = md.constant([1.0, 2.0])
    for n in COUNTS:
        strategy = strategies(n)
        assert strategy.reduce("sum", 0) == 0
        assert strategy.reduce("sum", 0.0) == 0
        assert strategy.reduce("mean", 3.0) == 3
        assert strategy.reduce("mean", tensor) is tensor
        assert names(strategy.reduce("mean", tensor, destinations="cpu:6,7")) == ["cpu:6", "cpu:7"]
        if n == 1:
            assert strategy.reduce("sum", 3.0) == 3
            on_both = strategy.reduce("sum", tensor, destinations="cpu:6,7")
            assert names(on_both) == ["cpu:6", "cpu:7"]
            np.testing.assert_array_equal(on_both, [1, 2])
        else:
            for plain in (3.0, 3, tensor, np.ones(2)):
                with pytest.raises(ValueError, match=f"same in all {n} replicas"):
                    strategy.reduce("sum", plain)


@pytest.mark.parametrize("n", COUNTS)
def test_147_without_an_axis_over_replicas_only(strategies, n):
    strategy = strategies(n)
    parts = [np.arange(6.0).reshape(2, 3) + i for i in range(n)]
    total = strategy.reduce("sum", per_replica(strategy, parts))
    assert same_bits(total, n * np.arange(6.0).reshape(2, 3) + n * (n - 1) / 2)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("destinations", [None, "cpu:6", ["cpu:6", "cpu:0"]])
def test_148_149_150_over_the_batch_too(strategies, n, destinations):
    """Replica i has i + 1 rows of [i, 10 i]; the mean is over all rows, no mean of means."""
    strategy = strategies(n)
    value = per_replica(strategy, [np.full((i + 1, 2), [i, 10.0 * i]) for i in range(n)])
    rows = n * (n + 1) // 2
    total = sum(i * (i + 1) for i in range(n))
    expected = [device.short for device in md.devices(destinations or strategy.devices)]
    for op, right in (("sum", [total, 10 * total]), ("mean", [total / rows, 10 * total / rows])):
        for axis in (0, -2):
            result = strategy.reduce(op, value, axis=axis, destinations=destinations)
            np.testing.assert_allclose(result, right, rtol=1e-15)
            assert names(result) == expected
        # rank 1 gives a scalar
        losses = per_replica(strategy, [np.full(i + 1, float(i)) for i in range(n)])
        result = strategy.reduce(op, losses, 0, destinations)
        assert np.shape(result) == ()
        np.testing.assert_allclose(result, right[0], rtol=1e-15)


@pytest.mark.parametrize("axis", [1.0, "0", True, (0,), np.float64(0)])
def test_151_an_axis_is_an_int(strategies, axis):
    strategy = strategies(2)
    with pytest.raises(TypeError, match="axis must be an int"):
        strategy.reduce("sum", per_replica(strategy, counting(2)), axis=axis)


@pytest.mark.parametrize("axis", [2, -3, 9])
def test_151_an_axis_is_in_range(strategies, axis):
    strategy = strategies(2)
    with pytest.raises(ValueError, match=f"axis {axis} is out of range"):
        strategy.reduce("mean", per_replica(strategy, [np.ones((2, 2))] * 2), axis=axis)
    with pytest.raises(ValueError, match="out of range for a number"):
        strategy.reduce("mean", md.PerReplica(strategy.devices, [1.0, 2.0]), axis=0)


# --- sparse ---------------------------------------------------------------------------------------


def slices(values, indices, rows=4):
    return md.IndexedSlices(
        md.constant(values), md.constant(np.array(indices, np.int64)), (rows, 2)
    )


def test_152_indexed_slices_are_put_one_behind_the_other(strategies):
    for n in COUNTS:
        strategy = strategies(n)
        parts = [slices(np.full((2, 2), i + 1.0), [0, i % 4]) for i in range(n)]
        value = md.PerReplica(strategy.devices, parts)
        for op, factor in (("sum", 1.0), ("mean", 1 / n)):
            alone = strategy.reduce(op, value, destinations="cpu:6")
            (batch,) = strategy.batch_reduce(op, [(value, "cpu:6")])
            for result in (alone, batch):
                assert result.device.short == "cpu:6"
                assert result.dense_shape == (4, 2)
                assert result.indices.numpy().tolist() == [x for i in range(n) for x in (0, i % 4)]
                right = np.repeat(np.arange(1.0, n + 1), 2)[:, None] * np.ones(2) * factor
                np.testing.assert_array_equal(result.values.numpy(), right)
        everywhere = strategy.reduce("mean", value)
        assert names(everywhere) == [device.short for device in strategy.devices]
        dense = sum(part.numpy() for part in parts) / n
        for part in md.local_results(everywhere):
            np.testing.assert_allclose(part.numpy(), dense)


def test_153_a_mixture_becomes_dense(strategies):
    strategy = strategies(3)
    dense = md.constant(np.arange(8.0).reshape(4, 2))
    sparse = slices(np.ones((2, 2)), [1, 1])
    right = 2 * np.arange(8.0).reshape(4, 2)
    right[1] += 2
    for order in ([dense, sparse, dense], [sparse, dense, dense]):
        total = strategy.reduce("sum", md.PerReplica(strategy.devices, order))
        assert isinstance(md.local_results(total)[0], md.Tensor)
        np.testing.assert_array_equal(total, right)
    with pytest.raises(ShapeError, match="replica 1"):
        strategy.reduce(
            "sum", md.PerReplica(strategy.devices, [md.constant(np.ones(3)), sparse, dense])
        )


# --- one replica, numbers, packing ----------------------------------------------------------------


def test_154_one_replica_to_its_own_device_is_an_identity(strategies):
    strategy = strategies(1)
    tensor = md.constant([1.0, 2.0])
    for destinations in (None, "cpu:0", strategy.devices):
        for op in ("sum", "mean"):
            value = md.PerReplica(strategy.devices, [tensor])
            assert strategy.reduce(op, value, destinations=destinations) is tensor


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_155_156_packing_changes_no_bit_of_training(strategies, packing):
    """Gradients of several sizes through the optimizer; test_comm.py has the packs themselves."""
    sizes = [(3, 2), (5,), (), (40,), (1,)]
    dtypes = ["float32", "float32", "float64", "float32", "float64"]
    weights = []
    for options in ({}, packing):
        strategy = strategies(3, **options)
        random = np.random.default_rng(5)
        with strategy.scope():
            variables = [
                md.Variable(random.normal(size=size), dtype=dtype)
                for size, dtype in zip(sizes, dtypes, strict=True)
            ]
        optimizer = md.optim.Momentum(0.1)
        gradients = [
            per_replica(strategy, [np.asarray(random.normal(size=size), dtype) for _ in range(3)])
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
        for _ in range(3):
            strategy.run(
                lambda *row, vs=variables, opt=optimizer: opt.apply_gradients(
                    zip(row, vs, strict=True)
                ),
                *gradients,
            )
        weights.append([[copy.array for copy in variable.copies] for variable in variables])
    for plain, packed in zip(*weights, strict=True):
        assert all(map(same_bits, plain, packed))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_repacking": -1},
        {"agg_small_grads_max_bytes": -1},
        {"agg_small_grads_max_bytes": 8, "agg_small_grads_max_group": 0},
        {"agg_small_grads_max_bytes": 8, "gradient_repacking": 2},
    ],
)
def test_155_156_packing_that_makes_no_sense(options):
    for policy in ("replicated", "independent"):
        with pytest.raises(ValueError, match=r"gradient_repacking|agg_small_grads"):
            md.Strategy("cpu*2", policy, **options)


@pytest.mark.parametrize("number", [3, 2.5, 0, True])
def test_160_a_number_stays_a_number(strategies, number):
    for n in COUNTS:
        assert strategies(n).broadcast(number) is number
        assert strategies(n).broadcast(number, "cpu:6") is number


@pytest.mark.parametrize("destinations", [None, "/device:CPU:0", "cpu*2"])
def test_161_the_sum_of_the_replicas_numbers(strategies, destinations):
    for n in COUNTS:
        strategy = strategies(n)
        ids = strategy.run(lambda: md.get_replica_context().replica_id)
        if n == 1:
            assert ids == 0
        assert strategy.reduce("sum", ids, destinations=destinations) == n * (n - 1) // 2
        tensors = strategy.run(lambda: md.constant(md.get_replica_context().replica_id))
        total = strategy.reduce("sum", tensors, destinations=destinations)
        assert int(total) == n * (n - 1) // 2


# --- gather ---------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    n=st.sampled_from(COUNTS),
    lengths=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_gather_is_numpys_concatenate(strategies, n, lengths, shape, dtype, data):
    """Unequal lengths along the axis, 0 among them."""
    strategy = strategies(n)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    random = np.random.default_rng(1)
    parts = []
    for length in lengths[:n]:
        own = list(shape)
        own[axis] = length
        parts.append(np.asarray(random.integers(0, 100, own), dtype))
    result = strategy.gather({"x": (per_replica(strategy, parts),)}, axis)["x"][0]
    assert result.device is strategy.devices[0]
    assert same_bits(result.numpy(), np.concatenate(parts, axis))


def test_gather_of_what_cannot_be_gathered(strategies):
    strategy = strategies(2)
    pair = lambda a, b: md.PerReplica(strategy.devices, [a, b])  # noqa: E731
    for value, axis, error, words in [
        (pair(np.ones((2, 2)), np.ones((2, 3))), 0, ShapeError, "replica 1"),
        (pair(np.ones(2), np.ones((2, 1))), 0, ShapeError, "replica 1"),
        (pair(np.ones(2), np.ones(2, "f4")), 0, ShapeError, "replica 1"),
        (pair(np.ones(2), np.ones(2)), 1, ValueError, "axis 1 is out of range"),
        (pair(1.0, 2.0), 0, ValueError, "axis 0 is out of range"),
        (pair(np.ones(2), "text"), 0, ValueError, "not a number"),
        (md.constant([1.0]), 0, ValueError, "same in all 2 replicas"),
        (pair(np.ones(2), np.ones(2)), 0.0, TypeError, "axis"),
    ]:
        with pytest.raises(error, match=words):
            strategy.gather(value, axis)
    tensor = md.constant([1.0])
    assert strategies(1).gather(tensor, 0) is tensor


# --- update ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", COUNTS)
def test_162_update_runs_once_for_each_copy_on_its_device(strategies, n):
    strategy = strategies(n)
    with strategy.scope():
        variable = md.Variable(np.zeros(2), name="v")
    shared = object()
    seen = []

    def fn(v, own, plain, *, both):
        assert v is variable
        assert plain is shared
        device = md.get_update_device()
        seen.append(device)
        assert own.device is device
        assert md.constant(1.0).device is device  # operations run there
        v.assign_add(own * 2.0 + both["x"])

    mirrored = strategy.broadcast(np.array([1.0, 2.0]))
    strategy.update(variable, fn, mirrored, shared, both={"x": strategy.broadcast(np.ones(2))})
    assert seen == list(strategy.devices)
    for copy in variable.copies:
        np.testing.assert_array_equal(copy.array, [3, 5])


def test_162_a_mirrored_argument_that_is_not_on_the_copys_device(strategies):
    strategy = strategies(2, "parameter_server")
    with strategy.scope():
        variable = md.Variable(0.0)
    total = strategy.reduce("sum", per_replica(strategy, [1.0, 2.0]))
    with pytest.raises(ValueError, match="destinations=variable"):
        strategy.update(variable, lambda v, x: v.assign(x), total)


def test_163_a_per_replica_argument(strategies):
    """TypeError before anything is called; a variable synchronized on read takes its own."""
    strategy = strategies(3)
    with strategy.scope():
        variable = md.Variable(0.0)
        own = md.Variable(
            0.0,
            synchronization=md.VariableSynchronization.ON_READ,
            aggregation=md.VariableAggregation.SUM,
        )
    value = per_replica(strategy, [1.0, 2.0, 4.0])
    called = []
    for arguments, named in (((value,), {}), (([value],), {}), ((), {"x": {"y": value}})):
        with pytest.raises(TypeError, match="PerReplica"):
            strategy.update(variable, lambda *a, **k: called.append(1), *arguments, **named)
        with pytest.raises(TypeError, match="PerReplica"):
            strategy.update_non_slot([variable], lambda *a, **k: called.append(1), value)
    assert not called
    results = strategy.update(own, lambda v, x: v.assign(x).read() * 10.0, value, group=False)
    assert [float(copy.array) for copy in own.copies] == [1, 2, 4]
    assert isinstance(results, md.PerReplica)
    assert [float(result) for result in results.values] == [10, 20, 40]
    # and so does one that is an argument
    strategy.update(variable, lambda v, x: v.assign(x.read()), own)
    assert [float(copy.array) for copy in variable.copies] == [1, 2, 4]


@pytest.mark.parametrize("policy", POLICIES)
def test_164_update_of_what_is_no_variable_of_the_strategy(strategies, policy):
    strategy = strategies(2, policy)
    plain = md.Variable(0.0)
    for wrong in (3.0, None, plain, plain.copies[0], md.Mirrored(strategy.devices, [1, 2])):
        with pytest.raises(ValueError, match="takes a variable of"):
            strategy.update(wrong, lambda v: None)
        with pytest.raises((ValueError, TypeError)):
            strategy.update_non_slot(wrong, lambda: None)


@pytest.mark.parametrize("n", COUNTS)
def test_165_group(strategies, n):
    """With group=False there is a result for each copy; else None, everything being done."""
    strategy = strategies(n)
    with strategy.scope():
        variable = md.Variable(1.0)
    fn = lambda v: {"d": md.constant(2.0) * v, "same": 7}  # noqa: E731
    assert strategy.update(variable, fn) is None
    assert strategy.update(variable, fn, group=True) is None
    result = strategy.update(variable, fn, group=False)
    assert result["same"] == 7
    assert names(result["d"]) == [device.short for device in strategy.devices]
    if n > 1:
        assert isinstance(result["d"], md.Mirrored)
    assert strategy.update(variable, lambda v: v.assign_add(1.0), group=False) is variable
    assert strategy.update_non_slot([variable], lambda: 5, group=False) == 5
    assert strategy.update_non_slot([variable], lambda: 5) is None
    assert strategy.group({"a": result["d"], "b": [variable, 3, None]}) is None


def test_166_update_non_slot(strategies):
    """On all devices where every replica has a copy, else on that of the first variable by name."""

    def where(policy):
        strategy = strategies(3, policy)
        with strategy.scope():
            variables = [md.Variable(0.0, name=name) for name in ("n", "x", "c", "z")]
        seen = []

        def fn(text, number):
            assert (text, number) == ("step", 2.0)
            assert md.in_cross_replica_context()
            assert md.get_update_device() is md.constant(0.0).device
            seen.append(md.get_update_device().short)
            return md.constant(number)

        result = strategy.update_non_slot(variables, fn, "step", number=2.0, group=False)
        assert names(result) == seen
        return seen

    assert where("replicated") == ["cpu:0", "cpu:1", "cpu:2"]
    assert where("parameter_server") == ["host"]
    assert where("parameter_server_device") == ["cpu:2"]  # "c" was the third to be placed
    with pytest.raises(ValueError, match="no variables"):
        strategies(2).update_non_slot([], lambda: None)


def test_167_the_default_strategy(strategies):
    strategy = md.get_strategy()
    variable = md.Variable(1.0)
    argument = object()
    calls = []

    def fn(*args):
        calls.append(args)
        return args

    result = strategy.update(variable, fn, argument, group=False)
    assert calls == [(variable, argument)]
    assert result[0] is variable
    assert result[1] is argument
    assert strategy.update_non_slot([variable], fn, argument, group=False) == (argument,)
    assert calls[1:] == [(argument,)]


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device", "replicated"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_168_a_hand_written_loop_trains(strategies, n, policy, outer):
    """run, reduce, update: w goes to the mean of the replicas' targets as gradient descent does."""
    strategy = strategies(n, policy)
    with strategy.scope():
        w = md.Variable(np.array([4.0]), name="w")

    def gradient():
        with md.GradientTape() as tape:
            loss = md.ops.reduce_sum(md.ops.square(w - (md.get_replica_context().replica_id + 1.0)))
        return tape.gradient(loss, w), loss

    def steps():
        losses = []
        for _ in range(10):
            gradients, loss = strategy.run(gradient)
            mean = strategy.reduce("mean", gradients, destinations=w)
            strategy.update(w, lambda v, g: v.assign_sub(g * 0.2), mean)
            losses.append(float(strategy.reduce("mean", loss)))
        return losses

    if outer:
        with strategy.scope():
            losses = steps()
    else:
        losses = steps()
    assert all(later < earlier for earlier, later in pairwise(losses))
    target = (n + 1) / 2
    right = target + (4.0 - target) * (1 - 0.4) ** 10
    for copy in w.copies:
        np.testing.assert_allclose(copy.array, [right], rtol=1e-12)


def test_169_inside_an_update(strategies):
    strategy = strategies(2)
    with strategy.scope():
        outer = md.Variable(0.0, name="outer")
        inner = md.Variable(0.0, name="inner")
    seen = []

    def fn(v, depth):
        device = md.get_update_device()
        assert md.get_replica_context() is None
        assert md.get_cross_replica_context() is strategy
        assert md.get_strategy() is strategy
        if depth:
            strategy.update(inner, fn, depth - 1)
            assert md.get_update_device() is device
        seen.append((v.name, device.short))

    assert md.get_update_device() is None
    strategy.update(outer, fn, 1)
    assert md.get_update_device() is None
    assert seen == [
        ("inner", "cpu:0"),
        ("inner", "cpu:1"),
        ("outer", "cpu:0"),
        ("inner", "cpu:0"),
        ("inner", "cpu:1"),
        ("outer", "cpu:1"),
    ]

    def fails(v):
        raise KeyError("own")

    with strategy.scope(), pytest.raises(KeyError, match="own"):
        strategy.update(outer, fails)
    assert md.get_update_device() is None
    assert not md.has_strategy()


def test_colocate_vars_with(strategies):
    """23, 210: variables of one copy are put where another one's is."""
    strategy = strategies(3, "parameter_server_device")
    places = lambda variable: [copy.device.short for copy in variable.copies]  # noqa: E731
    with strategy.scope():
        first = md.Variable(np.zeros(100), name="first")
        with strategy.colocate_vars_with(first):
            beside = md.Variable(np.zeros(100), name="beside")
            strategy.run(lambda: md.Variable(np.zeros(7), name="in_replica"))
        apart = md.Variable(np.zeros(1), name="apart")
        assert places(beside) == places(first)
        assert places(apart) != places(first)
    replicated = strategies(3)
    with replicated.scope():
        everywhere = md.Variable(0.0)
        with replicated.colocate_vars_with(everywhere):
            assert places(md.Variable(1.0)) == places(everywhere)
    for wrong in (None, "first", everywhere, first.copies[0], md.Variable(0.0)):
        with pytest.raises(ValueError, match="colocate_vars_with takes a variable of"):
            strategy.colocate_vars_with(wrong)


# --- contexts -------------------------------------------------------------------------------------


VERBS = {
    "batch_reduce": lambda s: s.batch_reduce("sum", []),
    "broadcast": lambda s: s.broadcast(1.0),
    "gather": lambda s: s.gather(1.0, 0),
    "update_non_slot": lambda s: s.update_non_slot([], lambda: None),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_for_all_replicas_in_the_wrong_context(strategies, verb):
    """10, 11, 13."""
    strategy = strategies(2)
    with pytest.raises(ContextError, match=rf"{verb}.*replica"):
        strategy.run(lambda: VERBS[verb](strategy))
    with strategies(3).scope(), pytest.raises(ContextError, match="Mixing different"):
        VERBS[verb](strategy)


@pytest.mark.parametrize("verb", ["reduce", "batch_reduce", "broadcast", "gather", "update"])
def test_verbs_work_in_a_merge_function(strategies, verb):
    strategy = strategies(2)
    with strategy.scope():
        variable = md.Variable(np.zeros(2))

    def merge(s, x):
        if verb == "reduce":
            return s.reduce("sum", x)
        if verb == "batch_reduce":
            return s.batch_reduce("sum", [(x, None)])[0]
        if verb == "broadcast":
            return s.broadcast(np.array([11.0, 22.0]))
        if verb == "gather":
            return md.ops.reduce_sum(md.ops.reshape(s.gather(x, 0), [2, 2]), 0)
        s.update(variable, lambda v, y: v.assign(y), s.reduce("sum", x))
        return s.broadcast(variable)

    def step(x):
        return md.get_replica_context().merge_call(merge, x).numpy()

    results = strategy.run(step, per_replica(strategy, counting(2)))
    for result in md.local_results(results):
        np.testing.assert_array_equal(result, [11, 22])
