"""Variables: what assigning means in each context, and how replicas create one together."""

from __future__ import annotations

import numpy as np
import pytest
from assigning import FIRST, MEAN, NONE, START, SUM, VERBS, check, in_each, strategy_of, variable
from policies import POLICIES, replica_id

import minidist as md
from minidist.errors import ContextError, MergeMismatchError, ShapeError

N = 3


@pytest.fixture(params=POLICIES)
def strategy(request):
    with strategy_of(request.param, N) as strategy:
        yield strategy


@pytest.fixture
def replicated():
    with md.Strategy(f"cpu*{N}") as strategy:
        yield strategy


# --- assigning in a replica ---------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_without_an_aggregation_a_replica_cannot_assign(strategy, verb):
    """112."""
    v = variable(strategy)
    with pytest.raises(ValueError, match=r"'v'.*aggregation") as caught:
        strategy.run(lambda: getattr(v, verb)(md.constant(START)))
    assert all(option in str(caught.value) for option in ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
    check(v, START)


@pytest.mark.parametrize("make", [md.constant, np.array], ids=["tensor", "array"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("aggregation", "merged"),
    [
        (SUM, [6.0, 9.0]),
        (MEAN, [2.0, 3.0]),
        (FIRST, [1.0, 3.0]),
    ],
    ids=["sum", "mean", "first"],
)
def test_what_replicas_assign_is_aggregated_first(strategy, aggregation, merged, verb, make):
    """114, 117, 130."""
    v = variable(strategy, aggregation=aggregation)
    returned = in_each(
        strategy, lambda: getattr(v, verb)(make(np.array([1.0 + replica_id(), 3.0])))
    )
    assert all(value is v for value in returned)
    check(v, VERBS[verb](START, np.array(merged)))


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 1.0), (MEAN, 1 / 3), (FIRST, 0.0)])
def test_replicas_may_assign_numbers_of_their_own(strategy, aggregation, expected):
    v = variable(strategy, 0.0, aggregation=aggregation, dtype="float64")
    strategy.run(lambda: v.assign([0.0, 0.25, 0.75][replica_id()]))
    check(v, expected)


def test_the_sum_of_one_number_for_all_is_not_defined(strategy):
    """113: is it meant once, or once for each replica?"""
    v = variable(strategy, 1.0, aggregation=SUM)
    with pytest.raises(ValueError, match=r"'v'.*5\.0"):
        strategy.run(lambda: v.assign(5.0))
    array = np.array(5.0)
    with pytest.raises(ValueError, match=r"'v'.*reduced"):
        strategy.run(lambda: v.assign(array))
    check(v, 1.0)


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_zero_can_always_be_reduced(strategy, aggregation):
    """119."""
    v = variable(strategy, 7.0, aggregation=aggregation)
    strategy.run(lambda: v.assign_add(0))
    check(v, 7.0)


@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_the_mean_of_one_number_for_all_is_that_number(strategy, aggregation):
    """115."""
    v = variable(strategy, 1.0, aggregation=aggregation)
    strategy.run(lambda: v.assign(5.0))
    check(v, 5.0)


def test_a_counter_of_the_first_replica_counts_runs(strategy):
    """118."""
    v = variable(strategy, 0, aggregation=FIRST)
    assert v.dtype == np.int64
    for _ in range(3):
        strategy.run(lambda: v.assign_add(1))
    check(v, 3)


def test_one_replica_needs_no_arithmetic_to_aggregate():
    with md.Strategy("cpu*1") as strategy:
        v = variable(strategy, 0.0, aggregation=SUM)
        strategy.run(lambda: v.assign_add(5.0))
        check(v, 5.0)


def test_a_mean_of_integers_is_an_error_and_a_sum_is_not(strategy):
    """131, decision 5."""
    v = variable(strategy, 10, aggregation=SUM)
    strategy.run(lambda: v.assign_add(md.constant(replica_id() + 1)))
    check(v, 16)
    v = variable(strategy, 10, aggregation=MEAN)
    for verb in VERBS:
        with pytest.raises(TypeError, match=r"'v'.*int64"):
            strategy.run(lambda verb=verb: getattr(v, verb)(md.constant(replica_id())))
    check(v, 10)


def test_reading_after_assigning_in_the_same_run_gives_the_new_value(strategy):
    v = variable(strategy, aggregation=MEAN)

    def step():
        before = v.numpy()
        v.assign_add(md.constant(np.array([1.0, 2.0])))
        return before, v.numpy()

    for before, after in in_each(strategy, step):
        np.testing.assert_array_equal(before, START)
        np.testing.assert_array_equal(after, START + np.array([1.0, 2.0]))


# --- assigning for all replicas -----------------------------------------------------------------


@pytest.mark.parametrize("make", [np.array, md.constant, list], ids=["array", "tensor", "list"])
@pytest.mark.parametrize("verb", VERBS)
def test_in_cross_replica_context_every_copy_is_assigned(strategy, verb, make):
    """116."""
    v = variable(strategy)
    value = make(np.array([1.0, 2.0]))
    assert getattr(v, verb)(value) is v
    check(v, VERBS[verb](START, np.array([1.0, 2.0])))
    with strategy.scope():
        v.assign(make(START))
    check(v, START)


def test_a_merge_function_assigns_for_all(strategy):
    v = variable(strategy)
    strategy.run(
        lambda: md.get_replica_context().merge_call(lambda _: (v.assign_add(np.ones(2)), None)[1])
    )
    check(v, START + 1)


def test_a_variable_may_be_assigned_to_another(strategy):
    v, w = variable(strategy), variable(strategy, np.zeros(2))
    w.assign_add(v)
    check(w, START)


def test_each_copy_takes_its_component_of_a_mirrored_value(replicated):
    v = variable(replicated, 0.0)
    v.assign(md.Mirrored(replicated.devices, [np.float32(i) for i in range(N)]))
    assert [float(copy.array) for copy in v.copies] == [0.0, 1.0, 2.0]


def test_a_per_replica_value_must_be_reduced_first(strategy):
    v = variable(strategy)
    with pytest.raises(ValueError, match=r"'v'.*reduce"):
        v.assign(md.PerReplica(strategy.devices, [START] * N))
    check(v, START)


@pytest.mark.parametrize("verb", VERBS)
def test_a_value_of_another_shape_is_an_error(strategy, verb):
    v = variable(strategy, aggregation=MEAN)
    for value in [np.ones(3), md.constant(np.ones((1, 2))), np.ones((2, 2))]:
        with pytest.raises(ShapeError, match="'v'"):
            getattr(v, verb)(value)
    with pytest.raises(ShapeError, match="'v'"):
        strategy.run(lambda: getattr(v, verb)(md.constant(np.ones(3))))
    check(v, START)


def test_a_tensor_of_another_dtype_is_an_error(strategy):
    v = variable(strategy)
    with pytest.raises(ShapeError, match=r"'v'.*float64.*float32"):
        v.assign(md.constant(START.astype(np.float32)))
    check(v, START)


def test_an_integer_variable_takes_no_fraction(strategy):
    v = variable(strategy, 3)
    with pytest.raises((TypeError, ValueError), match="'v'"):
        v.assign(2.5)
    check(v, 3)


# --- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
@pytest.mark.parametrize("verb", VERBS)
def test_in_an_update_one_copy_is_assigned_and_nothing_aggregated(strategy, verb, aggregation):
    """120, 162."""
    v = variable(strategy, aggregation=aggregation)
    result = VERBS[verb](START, np.array([6.0, 6.0]))
    seen = []

    def fn(variable, value, *, scale):
        copy = v.copies[len(seen)]
        assert variable is v
        assert md.get_update_device() is copy.device
        assert md.get_replica_context() is None
        assert md.get_strategy() is md.get_cross_replica_context() is strategy
        np.testing.assert_array_equal(v.numpy(), copy.array)
        seen.append(getattr(v, verb)(value * scale) is v)
        done = [np.array_equal(c.array, result) for c in v.copies]
        assert done == [i < len(seen) for i in range(len(v.copies))]

    strategy.update(v, fn, np.array([3.0, 3.0]), scale=2)
    assert seen == [True] * len(v.copies)
    assert md.get_update_device() is None
    check(v, result)


def test_an_update_splits_mirrored_arguments_by_device(replicated):
    """162, 163."""
    v = variable(replicated, 0.0)
    value = md.Mirrored(replicated.devices, [np.float32(i) for i in range(N)])
    replicated.update(v, lambda w, x, k: w.assign(x + k["k"]), value, k={"k": value})
    assert [float(copy.array) for copy in v.copies] == [0.0, 2.0, 4.0]
    reads = in_each(replicated, lambda: float(v.read()))
    assert reads == [0.0, 2.0, 4.0]
    with pytest.raises(TypeError, match="PerReplica"):
        replicated.update(v, lambda w, x: w.assign(x), md.PerReplica(replicated.devices, [1, 2, 3]))


def test_an_update_that_fails_leaves_its_context(strategy):
    v = variable(strategy)
    with pytest.raises(ZeroDivisionError):
        strategy.update(v, lambda w: 1 / 0)
    assert md.get_update_device() is None
    assert not md.has_strategy()


def test_an_update_inside_a_merge_function(strategy):
    v = variable(strategy)

    def merge(given):
        assert given is strategy
        given.update(v, lambda w: w.assign_add(np.ones(2)))
        assert md.get_update_device() is None

    strategy.run(lambda: md.get_replica_context().merge_call(merge))
    check(v, START + 1)


def test_update_takes_variables_of_its_own_strategy_and_nothing_else(strategy):
    """11, 164."""
    with md.Strategy("cpu*2") as other:
        stranger = variable(other)
        for wrong in [stranger, 3, START]:
            with pytest.raises((ValueError, ContextError), match="update"):
                strategy.update(wrong, lambda w: None)


def test_in_a_replica_update_is_an_error(strategy):
    """10."""
    v = variable(strategy)
    with pytest.raises(RuntimeError, match=r"update.*replica"):
        strategy.run(lambda: strategy.update(v, lambda w: None))


# --- belonging to a strategy --------------------------------------------------------------------


def test_another_strategy_can_neither_read_nor_assign_it(strategy):
    """108."""
    v = variable(strategy, aggregation=MEAN)
    with md.Strategy("cpu*2") as other:
        for action in [v.numpy, lambda: v.assign(START), lambda: v.assign_add(START)]:
            with other.scope(), pytest.raises(RuntimeError, match="'v'"):
                action()
            with pytest.raises(RuntimeError, match="'v'"):
                other.run(action)
    check(v, START)


def test_outside_any_scope_it_is_read_and_assigned_as_in_its_own(strategy):
    """102, 108, 127."""
    v = variable(strategy)
    assert v.strategy is strategy
    v.assign(START + 1)
    np.testing.assert_array_equal(v.numpy(), START + 1)
    np.testing.assert_array_equal(np.asarray(v.read()), START + 1)


def test_with_no_strategy_there_is_one_copy_and_every_verb_works():
    v = md.Variable(START)
    assert len(v.copies) == 1
    assert v.name == "Variable"
    v.assign_add(np.ones(2)).assign_sub(md.constant(np.array([3.0, 3.0])))
    np.testing.assert_array_equal(v.numpy(), START - 2)
    strategy = md.get_strategy()
    strategy.update(v, lambda w, x: w.assign(x), np.zeros(2))  # 167
    np.testing.assert_array_equal(v.numpy(), np.zeros(2))
    opt = md.optim.SGD(0.5)
    opt.minimize(lambda: md.ops.reduce_sum(v * 2.0), [v])
    np.testing.assert_array_equal(v.numpy(), [-1.0, -1.0])


def test_what_numpy_returns_is_a_copy(strategy):
    v = variable(strategy)
    v.numpy()[:] = 0
    for values in in_each(strategy, v.numpy):
        values[:] = 0
    check(v, START)


# --- creation -----------------------------------------------------------------------------------


def test_in_scope_and_in_a_run_the_same_kind_of_variable_is_made(strategy):
    """90, 91, 128: once for all replicas, which get the same object."""
    inside = in_each(strategy, lambda: md.Variable(START, name="w"))
    assert all(v is inside[0] for v in inside)
    assert len(inside[0].copies) == len(variable(strategy).copies)
    check(inside[0], START)
    assert (inside[0].name, inside[0].shape, inside[0].dtype) == ("w", (2,), np.float64)
    assert inside[0].strategy is strategy


def test_creation_order_is_the_programs(strategy):
    def build():
        return [md.Variable(float(i), name=f"v{i}") for i in range(5)]

    names = [[v.name for v in made] for made in in_each(strategy, build)]
    assert names == [[f"v{i}" for i in range(5)]] * N


@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device", "replicated"])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: np.full(2, value),
        lambda value: lambda: np.full(2, value),
        lambda value: md.constant(np.full(2, value)),
    ],
    ids=["array", "callable", "tensor"],
)
def test_shared_variables_start_with_replica_0s_value(policy, make):
    """99."""
    with strategy_of(policy, N) as strategy:
        made = in_each(strategy, lambda: md.Variable(make(float(replica_id()))))
        check(made[0], np.zeros(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: np.full(2, value),
        lambda value: lambda: np.full(2, value),
        lambda value: md.constant(np.full(2, value)),
    ],
    ids=["array", "callable", "tensor"],
)
def test_independent_variables_start_with_each_replicas_own_value(make):
    with strategy_of("independent", N) as strategy:
        made = in_each(strategy, lambda: md.Variable(make(float(replica_id()))))
        assert [copy.array.tolist() for copy in made[0].copies] == [[i, i] for i in range(N)]
        reads = in_each(strategy, lambda: made[0].numpy().tolist())
        assert reads == [[i, i] for i in range(N)]


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("name", lambda i: md.Variable(1.0, name=f"{'ab'[i == 2]}")),
        ("dtype", lambda i: md.Variable(1.0, name="v", dtype=["float32", "float64"][i == 2])),
        ("dtype", lambda i: md.Variable(np.ones(2, ["f4", "f8"][i == 2]), name="v")),
        ("shape", lambda i: md.Variable(np.ones(2 + (i == 2)), name="v")),
        ("trainable", lambda i: md.Variable(1.0, name="v", trainable=i == 2)),
        ("aggregation", lambda i: md.Variable(1.0, name="v", aggregation=[SUM, MEAN][i == 2])),
    ],
    ids=["name", "dtype", "implied dtype", "shape", "trainable", "aggregation"],
)
def test_replicas_that_create_different_variables_are_an_error(strategy, what, make):
    """94, decision 2."""
    with pytest.raises(MergeMismatchError, match=what) as caught:
        strategy.run(lambda: make(replica_id()))
    assert "replica 0" in str(caught.value)
    assert "replica 2" in str(caught.value)


def test_a_replica_that_creates_fewer_variables_is_an_error(strategy):
    with pytest.raises(MergeMismatchError, match="replica 1"):
        strategy.run(lambda: [md.Variable(1.0) for _ in range(2 - (replica_id() == 1))])


def test_a_numeric_suffix_is_no_part_of_the_canonical_name(strategy):
    """93, 95: and replica 0's name is kept."""
    made = in_each(strategy, lambda: md.Variable(1.0, name=f"layer/v_{replica_id() + 4}"))
    assert made[0].name == "layer/v_4"


def test_the_same_name_may_be_used_again(strategy):
    """92, 96."""
    made = in_each(strategy, lambda: [md.Variable(float(i)) for i in range(2)])
    assert [v.name for v in made[0]] == ["Variable", "Variable"]
    check(made[0][0], 0.0)
    check(made[0][1], 1.0)


@pytest.mark.parametrize("inside", [False, True], ids=["in scope", "in run"])
def test_name_scopes_stand_before_the_name(replicated, inside):
    def make():
        with md.name_scope("a"), md.name_scope("b"):
            return md.Variable(1.0, name="v")

    if inside:
        assert in_each(replicated, make)[0].name == "a/b/v"
    else:
        with replicated.scope():
            assert make().name == "a/b/v"


@pytest.mark.parametrize("n", [1, 3])
def test_creator_scopes_run_on_each_replicas_thread_the_innermost_first(n):
    """Decision 2, 21."""
    asked = [[] for _ in range(n)]

    def creator(name):
        def create(next_creator, **kwargs):
            asked[replica_id()].append((name, kwargs["aggregation"], kwargs["synchronization"]))
            return next_creator(**{**kwargs, "name": kwargs["name"] + name})

        return create

    def make():
        with (
            md.variable_creator_scope(creator("-outer")),
            md.variable_creator_scope(creator("-inner")),
        ):
            return md.Variable(1.0, name="v", aggregation=SUM)

    with md.Strategy(f"cpu*{n}") as strategy:
        made = in_each(strategy, make)
    auto = md.VariableSynchronization.AUTO
    assert asked == [[("-inner", SUM, auto), ("-outer", SUM, auto)]] * n
    assert {v.name for v in made} == {"v-inner-outer"}


def test_creating_in_a_merge_function_is_no_meeting(strategy):
    made = in_each(
        strategy, lambda: md.get_replica_context().merge_call(lambda _: md.Variable(START))
    )
    assert all(v is made[0] for v in made)
    check(made[0], START)


@pytest.mark.parametrize("option", ["synchronization", "aggregation"])
def test_unknown_options_are_errors_that_name_the_variable(strategy, option):
    """98."""
    with strategy.scope(), pytest.raises(ValueError, match="'v'"):
        md.Variable(1.0, name="v", **{option: "sum"})


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, None, "float32"),
        ([1.0, 2.0], None, "float32"),
        (3, None, "int64"),
        (np.float64(1), None, "float64"),
        (START, None, "float64"),
        (START, "float32", "float32"),
        (lambda: START.astype(np.float32), None, "float32"),
        (3, "float64", "float64"),
    ],
)
def test_the_dtype_is_the_values_own_unless_given(strategy, value, dtype, expected):
    """105."""
    v = variable(strategy, value, dtype=dtype)
    assert v.dtype == expected
    assert all(copy.array.dtype == expected for copy in v.copies)
    assert v.ndim == len(v.shape)
    assert v.size == np.prod(v.shape)


def test_copies_do_not_share_memory_with_the_initial_value_or_each_other(strategy):
    initial = START.copy()
    v = variable(strategy, initial)
    arrays = [initial, *(copy.array for copy in v.copies)]
    for i, a in enumerate(arrays):
        for b in arrays[i + 1 :]:
            assert not np.shares_memory(a, b)


@pytest.mark.parametrize("counts", [(5, 6), (5, 5), (1000, 1000), (0, 0), (-1, -1)])
def test_whole_numbers_are_each_replicas_own_whether_they_are_the_same_or_not(counts):
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            v = md.Variable(1.0, aggregation=md.VariableAggregation.SUM)
            n = md.Variable(np.int64(1), aggregation=md.VariableAggregation.SUM)

        def fn():
            count = counts[md.get_replica_context().replica_id]
            v.assign_add(count)
            n.assign_add(count)
            return count, md.get_replica_context().all_reduce("sum", count)

        count, total = strategy.run(fn)
        assert float(v.numpy()) == int(n.numpy()) == 1 + sum(counts)
        assert strategy.reduce("sum", count) == sum(counts)
        assert set(strategy.local_results(total)) == {sum(counts)}
