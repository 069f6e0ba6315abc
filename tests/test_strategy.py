"""Strategy: reduce against NumPy, all_reduce, and the contexts in which its verbs work."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from policies import replica_id

import minidist as md
from minidist.errors import ContextError, ShapeError

N = 3
FLOATS = {"float32": 1e-5, "float64": 1e-13}
MAKE = {"array": np.asarray, "tensor": md.constant}


@pytest.fixture(scope="module")
def strategy():
    with md.Strategy(f"cpu*{N}") as strategy:
        yield strategy


def per_replica(strategy, values):
    return md.PerReplica(strategy.devices[: len(values)], values)


def in_each(strategy, fn):
    results = [None] * strategy.num_replicas

    def call():
        results[replica_id()] = fn()

    strategy.run(call)
    return results


# --- reduce -------------------------------------------------------------------------------------


@st.composite
def components(draw, same_shape):
    """Return N arrays, the replicas' parts of one value: of one dtype, and alike but for axis 0."""
    dtype = draw(st.sampled_from([*FLOATS, "int64"]))
    tail = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    shared = draw(st.integers(0, 4))
    lengths = [shared if same_shape else draw(st.integers(0, 4)) for _ in range(N)]
    elements = st.integers(-1000, 1000)
    if dtype != "int64":
        elements = elements.map(lambda value: value / 8)
    return [draw(hnp.arrays(dtype, (length, *tail), elements=elements)) for length in lengths]


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=50, deadline=None)
@given(parts=components(same_shape=True))
@example(parts=[np.ones((0, 2))] * N)
@example(parts=[np.arange(4)] * N)
def test_reduce_is_numpys_sum_and_mean_over_replicas(strategy, kind, parts):
    """147; a mean is floating point, also of integers (decision 5)."""
    value = per_replica(strategy, [MAKE[kind](part) for part in parts])
    dtype = parts[0].dtype
    total = np.asarray(strategy.reduce("sum", value))
    assert total.dtype == dtype
    np.testing.assert_array_equal(total, np.sum(parts, axis=0, dtype=dtype))
    mean = np.asarray(strategy.reduce("mean", value))
    assert mean.dtype == (np.float64 if dtype == np.int64 else dtype)
    np.testing.assert_allclose(
        mean, np.mean(np.asarray(parts, float), axis=0), rtol=FLOATS.get(dtype.name, 1e-13)
    )


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=50, deadline=None)
@given(parts=components(same_shape=False))
@example(parts=[np.ones((0, 2))] * N)
@example(parts=[np.ones((3, 2)), np.ones((1, 2)), np.zeros((0, 2))])
@example(parts=[np.array([1, 2]), np.array([4]), np.array([], np.int64)])
def test_reduce_over_an_axis_counts_the_true_number_of_elements(strategy, kind, parts):
    """148-150: never a mean of means; 0 where there is none."""
    value = per_replica(strategy, [MAKE[kind](part) for part in parts])
    whole = np.concatenate(parts)
    total = np.asarray(strategy.reduce("sum", value, axis=0))
    assert total.dtype == whole.dtype
    np.testing.assert_allclose(total, whole.sum(axis=0), rtol=FLOATS.get(whole.dtype.name, 0))
    mean = np.asarray(strategy.reduce("mean", value, axis=0))
    right = whole.astype(float).mean(axis=0) if len(whole) else np.zeros(whole.shape[1:])
    assert mean.dtype == (np.float64 if whole.dtype == np.int64 else whole.dtype)
    np.testing.assert_allclose(mean, right, rtol=FLOATS.get(whole.dtype.name, 1e-13), atol=1e-12)


def test_sums_run_in_replica_order(strategy):
    """Decision 1: ((a + b) + c), which in float32 is not (a + (b + c))."""
    a, b, c = np.float32(1e8), np.float32(-1e8), np.float32(1)
    for order, right in [((a, b, c), 1), ((a, c, b), 0), ((c, b, a), 0)]:
        value = per_replica(strategy, [md.constant(np.full(2, x)) for x in order])
        np.testing.assert_array_equal(strategy.reduce("sum", value).numpy(), [right, right])


def test_numbers_reduce_to_numbers(strategy):
    value = per_replica(strategy, [1, 2, 6])
    assert strategy.reduce("sum", value) == 9
    assert strategy.reduce("mean", value) == 3.0
    assert strategy.reduce("mean", per_replica(strategy, [1, 1, 2])) == 4 / 3
    assert strategy.reduce("sum", per_replica(strategy, [0.5, 0.25, 0.125])) == 0.875


@pytest.mark.parametrize("op", ["sum", "SUM", "mean", "MEAN"])
def test_operations_are_known_in_small_and_capital_letters(strategy, op):
    """144."""
    assert strategy.reduce(op, per_replica(strategy, [3.0, 4.0, 5.0])) == (
        12 if op in "sum SUM" else 4
    )


def test_booleans_are_counted(strategy):
    for value in ([True, False, True], [md.constant(np.array(x)) for x in (True, False, True)]):
        assert int(strategy.reduce("sum", per_replica(strategy, value))) == 2
    flags = [np.array([True, True]), np.array([False]), np.array([True])]
    for make in MAKE.values():
        value = per_replica(strategy, [make(flag) for flag in flags])
        assert int(strategy.reduce("sum", value, axis=0)) == 3
        assert float(strategy.reduce("mean", value, axis=0)) == 0.75


def test_structures_are_reduced_leaf_by_leaf(strategy):
    value = {
        "a": per_replica(strategy, [1, 2, 3]),
        "b": (per_replica(strategy, [0.5, 0.5, 0.5]), 0),
    }
    assert strategy.reduce("sum", value) == {"a": 6, "b": (1.5, 0)}


def test_what_run_returns_can_be_reduced(strategy):
    """161: also where all replicas return the very same object."""
    assert strategy.reduce("sum", strategy.run(lambda: replica_id())) == N * (N - 1) // 2
    assert strategy.reduce("mean", strategy.run(lambda: 7.0)) == 7.0
    total = strategy.reduce("sum", strategy.run(lambda: md.constant(np.full(2, 1.5))))
    np.testing.assert_array_equal(total.numpy(), [4.5, 4.5])


def test_the_result_of_tensors_is_on_their_devices_and_new(strategy):
    parts = in_each(strategy, lambda: md.constant(np.ones(2)))
    for op in ["sum", "mean"]:
        result = strategy.reduce(op, per_replica(strategy, parts))
        for device in strategy.devices:
            own = result.get(device)
            assert own.device is device
            assert not any(np.shares_memory(own.array, part.array) for part in parts)
    assert all(part.numpy().tolist() == [1, 1] for part in parts)


def test_plain_values(strategy):
    """145, 146, 154: they are their mean; only 0 has a sum, and all have for one replica."""
    assert strategy.reduce("mean", 3.0) == 3.0
    assert strategy.reduce("sum", 0) == 0
    assert strategy.reduce("mean", md.Mirrored(strategy.devices, [2.0, 2.0, 2.0])) == 2.0
    with pytest.raises(ValueError, match=r"3\.0"):
        strategy.reduce("sum", 3.0)
    with md.Strategy("cpu") as one:
        assert one.reduce("sum", 3.0) == 3.0
        assert one.reduce("sum", per_replica(one, [3.0])) == 3.0


@pytest.mark.parametrize(
    ("op", "values", "options", "error", "words"),
    [
        ("max", [1, 2, 3], {}, ValueError, "max"),
        ("sum", [np.ones(2)] * 3, {"axis": 1.0}, TypeError, "axis"),
        ("sum", [np.ones(2)] * 3, {"axis": True}, TypeError, "axis"),
        ("sum", [np.ones(2)] * 3, {"axis": 1}, ValueError, "axis 1"),
        ("sum", [np.ones(2)] * 3, {"axis": -2}, ValueError, "axis -2"),
        ("mean", [1.0, 2.0, 3.0], {"axis": 0}, ValueError, "axis 0"),
        ("sum", [np.ones(2), np.ones(3), np.ones(2)], {}, ShapeError, "replica 1"),
        ("sum", [np.ones(2), np.ones(2), np.ones((1, 2))], {}, ShapeError, "replica 2"),
        ("sum", [np.ones(2), np.ones(2, np.float32), np.ones(2)], {}, ShapeError, "replica 1"),
        ("sum", [1, None, 2], {}, ValueError, "None"),
        ("sum", ["a", "b", "c"], {}, (TypeError, ValueError), "reduce"),
    ],
)
def test_what_cannot_be_reduced_is_an_error(strategy, op, values, options, error, words):
    """143, 151."""
    with pytest.raises(error, match=words):
        strategy.reduce(op, per_replica(strategy, values), **options)


def test_negative_axes_count_from_the_end(strategy):
    """151."""
    parts = [np.arange(6.0).reshape(2, 3) * i for i in range(N)]
    value = per_replica(strategy, parts)
    np.testing.assert_array_equal(
        strategy.reduce("sum", value, axis=-1), np.sum(parts, axis=(0, 2))
    )
    np.testing.assert_allclose(strategy.reduce("mean", value, axis=-2), np.mean(parts, axis=(0, 1)))


# --- all_reduce ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "right"), [("sum", 6.0), ("mean", 2.0)])
def test_all_reduce_gives_every_replica_the_result_on_its_own_device(strategy, op, right):
    """158: over structures too."""

    def step():
        context = md.get_replica_context()
        own = md.constant(np.full(2, replica_id() + 1.0))
        result = context.all_reduce(op, {"a": own, "b": [own * 2.0, replica_id() + 1.0]})
        together = own + result["a"]  # would not do on another device
        assert result["a"].device is context.device
        return result["a"].numpy(), result["b"][0].numpy(), result["b"][1], together.numpy()

    for replica, (a, b, number, together) in enumerate(in_each(strategy, step)):
        np.testing.assert_array_equal(a, [right, right])
        np.testing.assert_array_equal(b, [2 * right, 2 * right])
        assert number == right
        np.testing.assert_array_equal(together, [right + replica + 1] * 2)


def test_all_reduce_with_no_strategy_is_the_value_itself():
    assert md.get_replica_context().all_reduce("sum", 3.0) == 3.0


def test_a_hand_written_loop_of_run_reduce_update_trains(strategy):
    """168: gradients computed in replicas, reduced and applied for all."""
    with strategy.scope():
        w = md.Variable(np.array([4.0, -2.0]), name="w")

    def gradient():
        with md.GradientTape() as tape:
            loss = md.ops.reduce_sum(md.ops.square(w - (replica_id() + 1.0)))
        return tape.gradient(loss, w)

    expected = np.array([4.0, -2.0])
    for _ in range(4):
        mean = strategy.reduce("mean", strategy.run(gradient))
        strategy.update(w, lambda v, g: v.assign_sub(g * 0.25), mean)
        expected = expected - 0.25 * 2 * (expected - 2.0)
        for variable in w.copies:
            np.testing.assert_allclose(variable.array, expected, rtol=1e-12)


# --- contexts -----------------------------------------------------------------------------------


VERBS = {
    "reduce": lambda s: s.reduce("sum", 0),
    "run": lambda s: s.run(lambda: None),
    "update": lambda s: s.update(None, lambda v: None),
    "scope": lambda s: s.scope(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_acts_for_all_replicas_is_an_error_in_one(strategy, verb):
    """10."""
    with pytest.raises(ContextError, match=rf"{verb}.*replica"):
        strategy.run(lambda: VERBS[verb](strategy))


@pytest.mark.parametrize("verb", VERBS)
def test_what_acts_for_all_replicas_is_an_error_in_another_strategys_scope(strategy, verb):
    """11, 13."""
    mixing = pytest.raises(ContextError, match="Mixing different")
    with md.Strategy("cpu*2") as other, other.scope(), mixing:
        VERBS[verb](strategy)


def test_reduce_and_run_work_with_and_without_the_strategys_scope(strategy):
    """4, 11, 12."""
    for _ in range(2):
        assert strategy.reduce("sum", strategy.run(replica_id)) == 3
    with strategy.scope(), strategy.scope():
        assert md.get_cross_replica_context() is strategy
        assert strategy.reduce("sum", strategy.run(replica_id)) == 3
        assert md.get_cross_replica_context() is strategy
    assert not md.has_strategy()


def test_default_contexts():
    """1, 2, 3, 5: exactly one of the two contexts is there."""

    def contexts():
        replica, cross = md.get_replica_context(), md.get_cross_replica_context()
        assert (replica is None) is (cross is not None) is md.in_cross_replica_context()
        return replica, cross, md.get_strategy(), md.has_strategy()

    replica, cross, default, has = contexts()
    assert replica.replica_id == 0
    assert cross is None
    assert not has
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            assert contexts() == (None, strategy, strategy, True)
        for i, (replica, *others) in enumerate(in_each(strategy, contexts)):
            assert replica.replica_id == i
            assert replica.strategy is strategy
            assert others == [None, strategy, True]
    assert contexts()[2] is default


def test_local_results(strategy):
    """72."""
    assert strategy.local_results(per_replica(strategy, [1, 2, 3])) == (1, 2, 3)
    assert strategy.local_results(7) == (7,)


def test_a_strategy_cannot_be_copied(strategy):
    """20."""
    with pytest.raises(RuntimeError, match="copied"):
        copy.copy(strategy)


@pytest.mark.parametrize("devices", ["", "cpu*0", "tpu*2", "cpu:0,0", ["cpu:0", "cpu:0"], []])
def test_devices_that_make_no_sense_are_errors(devices):
    """58, 65."""
    with pytest.raises(ValueError, match="device"):
        md.Strategy(devices)


def test_the_default_strategy_reduces_and_updates():
    strategy = md.get_strategy()
    assert strategy.num_replicas == 1
    assert strategy.reduce("sum", 3.0) == 3.0
    assert strategy.run(lambda x: x + 1, 1) == 2
