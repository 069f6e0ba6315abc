"""Rules 90 to 131: creating variables, assigning and reading them. See docs/semantics.md."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
from assigning import FIRST, MEAN, NONE, START, SUM, VERBS, check, in_each, strategy_of, variable
from policies import replica_id

import minidist as md
from minidist.creation import canonical_name
from minidist.errors import ContextError, MergeMismatchError, ShapeError, UsageError

AUTO, ON_WRITE, ON_READ, NO_SYNC = (
    md.VariableSynchronization.AUTO,
    md.VariableSynchronization.ON_WRITE,
    md.VariableSynchronization.ON_READ,
    md.VariableSynchronization.NONE,
)
COUNTS = [1, 2, 3, 5]
MERGED = {SUM: sum, MEAN: lambda parts: sum(parts) / len(parts), FIRST: lambda parts: parts[0]}


@pytest.fixture(params=["replicated", "parameter_server", "parameter_server_device"])
def policy(request):
    return request.param


@pytest.fixture(params=COUNTS)
def n(request):
    return request.param


@pytest.fixture
def strategy(policy, n):
    with strategy_of(policy, n) as strategy:
        yield strategy


@pytest.fixture
def mirrored(n):
    with md.Strategy(f"cpu*{n}") as strategy:
        yield strategy


@pytest.fixture
def two():
    with md.Strategy("cpu*2") as strategy:
        yield strategy


def components(v):
    return [component.numpy().tolist() for component in v.copies]


# --- creating -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["scope", "run"])
def test_090_each_replica_has_a_component_named_after_the_first(mirrored, n, where):
    if where == "scope":
        v = variable(mirrored, name="x")
    else:
        v = in_each(mirrored, lambda: md.Variable(START, name="x"))[0]
    assert isinstance(v, md.MirroredVariable)
    names = ["x", *(f"x/replica_{i}" for i in range(1, n))]
    assert [component.name for component in v.copies] == names
    assert [component.device.short for component in v.copies] == [f"cpu:{i}" for i in range(n)]


def test_091_a_variable_is_made_once_and_all_replicas_get_it(strategy):
    def create():
        return [md.Variable(float(i), name=f"v{i}") for i in range(3)]

    made = in_each(strategy, create)
    for variables in made:
        assert all(v is first for v, first in zip(variables, made[0], strict=True))
    assert strategy.run(create)[0].name == "v0"


def test_092_the_kth_variable_of_a_name_is_the_same_in_all_replicas(strategy):
    made = in_each(strategy, lambda: [md.Variable(float(i), name="v") for i in range(3)])
    for k in range(3):
        assert all(variables[k] is made[0][k] for variables in made)
        check(made[0][k], float(k))


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        (None, "Variable"),
        ("", "Variable"),
        ("foo", "foo"),
        ("foo_1", "foo"),
        ("foo_12", "foo"),
        ("foo_1/bar", "foo/bar"),
        ("foo_1/bar_23", "foo/bar"),
        ("foo/bar_1:0", "foo/bar:0"),
        ("foo_1/bar:0", "foo/bar:0"),
        ("foo1", "foo1"),
        ("foo1/bar2", "foo1/bar2"),
        ("foo_1a/bar", "foo_1a/bar"),
        ("foo_1_bar", "foo_1_bar"),
        ("2_layers", "2_layers"),
    ],
)
def test_093_a_number_at_the_end_of_a_name_is_not_canonical(name, canonical):
    assert canonical_name(name) == canonical


@pytest.mark.parametrize("n", [2, 3, 5])
def test_094_different_names_in_replicas_are_an_error(strategy, n):
    last = n - 1
    with pytest.raises(RuntimeError, match=rf"name is 'a' in replica 0 and 'b' in replica {last}"):
        strategy.run(lambda: md.Variable(1.0, name="ab"[replica_id() == last]))
    with strategy.scope():
        check(md.Variable(1.0), 1.0)


def test_095_names_that_differ_by_a_number_are_one_and_replica_0s_is_kept(strategy):
    made = in_each(
        strategy, lambda: md.Variable(1.0, name=f"a_{replica_id() + 7}/b_{replica_id()}")
    )
    assert {v.name for v in made} == {"a_7/b_0"}


def test_096_without_a_name_it_is_called_variable(strategy):
    assert variable(strategy, name=None).name == "Variable"
    assert {v.name for v in in_each(strategy, lambda: md.Variable(1.0))} == {"Variable"}


@pytest.mark.parametrize("synchronization", [AUTO, ON_WRITE])
def test_097_synchronization_says_which_kind_it_is(strategy, policy, n, synchronization):
    shared = variable(strategy, synchronization=synchronization)
    own = variable(strategy, synchronization=ON_READ)
    assert type(own) is md.SyncOnReadVariable
    assert len(own.copies) == n
    if policy == "replicated":
        assert type(shared) is md.MirroredVariable
        assert len(shared.copies) == n
    else:
        assert type(shared) is (md.AggregatingVariable if n > 1 else md.Variable)
        assert len(shared.copies) == 1
    assert isinstance(shared, md.Variable) and isinstance(own, md.Variable)
    assert {
        type(v) for v in in_each(strategy, lambda: md.Variable(1.0, synchronization=ON_READ))
    } == {md.SyncOnReadVariable}


@pytest.mark.parametrize("kind", ["MirroredVariable", "AggregatingVariable", "SyncOnReadVariable"])
def test_097_a_kind_is_no_constructor(two, kind):
    with two.scope(), pytest.raises(TypeError, match=rf"{kind}.*md\.Variable"):
        getattr(md, kind)(1.0)


@pytest.mark.parametrize("inside", [False, True], ids=["scope", "run"])
@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("synchronization", NO_SYNC, "v'.*NONE"),
        ("synchronization", "on_read", "v'.*VariableSynchronization"),
        ("synchronization", SUM, "v'.*VariableSynchronization"),
        ("aggregation", "sum", "v'.*VariableAggregation.*MEAN"),
        ("aggregation", ON_READ, "v'.*VariableAggregation"),
    ],
)
def test_098_no_and_unknown_synchronization_or_aggregation(strategy, inside, option, value, match):
    def create():
        return md.Variable(1.0, name="v", **{option: value})

    with strategy.scope(), pytest.raises(ValueError, match=match):
        strategy.run(create) if inside else create()


def test_098_also_what_a_creator_scope_asks_for_is_checked(two):
    def creator(following, **kwargs):
        return following(**{**kwargs, "synchronization": NO_SYNC})

    with two.scope(), md.variable_creator_scope(creator), pytest.raises(ValueError, match="'v'"):
        md.Variable(1.0, name="v")


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_099_all_components_start_with_the_firsts_value(strategy, synchronization):
    def draw():
        return md.random.stream(7).normal((3,), "float32")

    v = variable(strategy, draw, synchronization=synchronization)
    w = in_each(strategy, lambda: md.Variable(draw, synchronization=synchronization))[0]
    x = in_each(strategy, lambda: md.Variable(float(replica_id()), synchronization=synchronization))
    for made in (v, w):
        assert np.abs(made.copies[0].numpy()).max() > 0
        assert components(made) == components(made)[:1] * len(made.copies)
    assert components(x[0]) == [0.0] * len(x[0].copies)


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_100_it_is_initialized_from_the_start(strategy, synchronization):
    v = variable(strategy, lambda: START, synchronization=synchronization)
    assert v.is_initialized()
    assert components(v) == [START.tolist()] * len(v.copies)


def test_101_on_read_variables_are_not_trainable_unless_asked(strategy):
    assert not variable(strategy, synchronization=ON_READ).trainable
    assert variable(strategy, synchronization=ON_READ, trainable=True).trainable
    assert variable(strategy).trainable
    assert not variable(strategy, trainable=False).trainable
    made = in_each(strategy, lambda: md.Variable(1.0, synchronization=ON_READ))
    assert not made[0].trainable


def test_102_it_knows_its_strategy(strategy):
    for synchronization in (AUTO, ON_READ):
        v = variable(strategy, synchronization=synchronization)
        assert v.distribute_strategy is v.strategy is strategy
    assert md.Variable(1.0).distribute_strategy is md.get_strategy()


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_105_name_dtype_and_shape_are_the_first_components(strategy, synchronization):
    v = variable(strategy, np.ones((2, 3), "float64"), name="x", synchronization=synchronization)
    first = v.copies[0]
    assert (v.name, v.dtype, v.shape) == (first.name, first.dtype, first.shape)
    assert (v.name, v.dtype, v.shape) == ("x", np.float64, (2, 3))


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_106_the_components_may_be_on_other_devices_than_the_current_one(synchronization):
    with md.Strategy(["cpu:3", "cpu:4"]) as strategy:
        v = variable(strategy, aggregation=MEAN, synchronization=synchronization)
        for device in ["cpu:0", "cpu:3", "cpu:4"]:
            with md.device(device):
                np.testing.assert_array_equal(v.numpy(), START)
                v.assign(START)
                v.assign_add(md.constant(np.ones(2)))
                assert components(v) == [[11.0, 21.0]] * 2
                v.assign(START)
        v.get("cpu:4").write(md.constant(START + 1))
        with md.device("cpu:4"):
            assert v.get() is v.copies[1]
        with md.device("cpu:0"):
            assert v.get() is v.copies[0]


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
@pytest.mark.parametrize("synchronization", [AUTO, ON_WRITE, ON_READ])
def test_107_a_deep_copy_has_copies_of_the_components(strategy, synchronization, aggregation):
    v = variable(
        strategy, synchronization=synchronization, aggregation=aggregation, trainable=False
    )
    for i, component in enumerate(v.copies):
        component.write(md.ops.as_tensor(component) + float(i))
    w = copy.deepcopy(v)
    assert w is not v and type(w) is type(v)
    assert components(w) == components(v) == [[10.0 + i, 20.0 + i] for i in range(len(v.copies))]
    for name in ["name", "dtype", "trainable", "decays", "synchronization", "aggregation"]:
        assert getattr(w, name) == getattr(v, name)
    assert w.strategy is strategy
    assert [c.device for c in w.copies] == [c.device for c in v.copies]
    strategy.update(w, lambda x: x.assign(START * 0))
    assert components(w) == [[0.0, 0.0]] * len(v.copies)
    assert components(v) == [[10.0 + i, 20.0 + i] for i in range(len(v.copies))]
    assert all(c.container is w for c in w.copies)
    reads = in_each(strategy, lambda: (w.numpy().tolist(), v.numpy().tolist()))
    assert [read[0] for read in reads] == [[0.0, 0.0]] * strategy.num_replicas
    assert reads[-1][1] == components(v)[-1]


def test_107_in_replicas_the_deep_copy_is_one_for_all(strategy):
    v = variable(strategy)
    made = in_each(strategy, lambda: copy.deepcopy({"v": v, "same": v}))
    assert made[0]["v"] is made[0]["same"] is not v
    assert all(copied["v"] is made[0]["v"] for copied in made)
    check(made[0]["v"], START)


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_108_another_strategy_may_not_use_it(strategy, synchronization):
    v = variable(strategy, aggregation=MEAN, synchronization=synchronization)
    actions = [v.read, v.numpy, lambda: v + 1.0, v.get, v.to_save, lambda: v.restore(START)]
    actions += [lambda verb=verb: getattr(v, verb)(START) for verb in VERBS]
    with md.Strategy("cpu*2") as other:
        for action in actions:
            with other.scope(), pytest.raises(RuntimeError, match=r"Mixing.*'v'"):
                action()
            with pytest.raises(RuntimeError, match=r"Mixing.*'v'"):
                other.run(action)
    # With no scope at all it is as in its own.
    v.assign(START)
    np.testing.assert_array_equal(v.numpy(), START)
    np.testing.assert_array_equal(v.to_save(), START)


def test_108_what_belongs_to_no_strategy_can_be_read_anywhere_and_assigned_nowhere_else(strategy):
    v = md.Variable(START, name="v")
    assert type(v) is md.Variable
    with strategy.scope():
        np.testing.assert_array_equal(v.numpy(), START)
        with pytest.raises(RuntimeError, match=r"Mixing.*'v'"):
            v.assign(START)
    for read in in_each(strategy, v.numpy):
        np.testing.assert_array_equal(read, START)
    with pytest.raises(RuntimeError, match=r"Mixing.*'v'"):
        strategy.run(lambda: v.assign(START))


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_109_a_handle_is_a_replicas_or_an_updates(mirrored, synchronization):
    v = variable(mirrored, synchronization=synchronization)
    for context in (mirrored.scope(), md.device("cpu:0")):
        with context, pytest.raises(ValueError, match=r"'v'.*handle"):
            _ = v.handle
    handles = in_each(mirrored, lambda: v.handle)
    assert all(handle is component for handle, component in zip(handles, v.copies, strict=True))
    seen = []
    mirrored.update(v, lambda w: seen.append(w.handle))
    assert seen == list(v.copies)


@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device"])
def test_111_only_several_replicas_have_something_to_aggregate(strategy, n):
    v = variable(strategy)
    assert type(v) is (md.AggregatingVariable if n > 1 else md.Variable)
    if n == 1:  # nothing can differ, so nothing need be said about it
        strategy.run(lambda: v.assign(START + 1))
        check(v, START + 1)


@pytest.mark.parametrize("n", [1, 2])
def test_111_a_mirrored_variable_is_one_also_of_one_replica(mirrored):
    v = variable(mirrored)
    assert type(v) is md.MirroredVariable
    with pytest.raises(ValueError, match=r"'v'.*aggregation"):
        mirrored.run(lambda: v.assign(START))


# --- assigning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_112_without_aggregation_a_replica_may_not_assign(mirrored, verb):
    v = variable(mirrored)
    with pytest.raises(ValueError, match=r"'v'.*aggregation"):
        mirrored.run(lambda: getattr(v, verb)(START))
    check(v, START)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("verb", VERBS)
def test_113_the_sum_of_one_number_for_all_is_not_defined(strategy, verb):
    v = variable(strategy, 1.0, aggregation=SUM)
    with pytest.raises(ValueError, match=r"non-DistributedValues value 5\.0.*cannot be reduced"):
        strategy.run(lambda: getattr(v, verb)(5.0))
    check(v, 1.0)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("aggregation", [SUM, MEAN])
def test_114_different_values_are_aggregated_first(strategy, n, aggregation, verb):
    v = variable(strategy, aggregation=aggregation)
    strategy.run(lambda: getattr(v, verb)(md.constant(np.array([replica_id() + 1.0, 4.0]))))
    merged = MERGED[aggregation]([np.array([i + 1.0, 4.0]) for i in range(n)])
    check(v, VERBS[verb](START, merged))


@pytest.mark.parametrize("verb", VERBS)
def test_115_the_mean_of_one_number_for_all_is_that_number(strategy, verb):
    v = variable(strategy, 2.0, aggregation=MEAN)
    strategy.run(lambda: getattr(v, verb)(5.0))
    check(v, VERBS[verb](2.0, 5.0))


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
@pytest.mark.parametrize("verb", VERBS)
def test_116_for_all_replicas_every_component_is_assigned(strategy, verb, aggregation):
    v = variable(strategy, aggregation=aggregation)
    change = np.array([1.0, 2.0])
    with strategy.scope():
        new = getattr(v, verb)(change)
    np.testing.assert_array_equal(np.asarray(new), VERBS[verb](START, change))
    check(v, VERBS[verb](START, change))
    v.assign(START, read_value=False)
    check(v, START)
    strategy.run(
        lambda: md.get_replica_context().merge_call(lambda _: (getattr(v, verb)(change), None)[1])
    )
    check(v, VERBS[verb](START, change))


def test_116_a_value_may_be_what_the_variable_reads_as(strategy):
    v = variable(strategy)
    v.assign_add(v)
    check(v, 2 * START)
    v.assign_add(v.read())
    check(v, 4 * START)
    with strategy.scope():
        v.assign_sub(v.read())
    check(v, 0 * START)


@pytest.mark.parametrize("verb", VERBS)
def test_117_only_the_first_replicas_value_counts(strategy, n, verb):
    v = variable(strategy, aggregation=FIRST)
    own = variable(strategy, aggregation=FIRST, synchronization=ON_READ)

    def step():
        value = md.constant(np.array([replica_id() + 1.0, 4.0]))
        getattr(v, verb)(value)
        getattr(own, verb)(value)
        return own.numpy()

    reads = in_each(strategy, step)
    check(v, VERBS[verb](START, np.array([1.0, 4.0])))
    for i, read in enumerate(reads):
        np.testing.assert_array_equal(read, VERBS[verb](START, np.array([i + 1.0, 4.0])))
    np.testing.assert_array_equal(own.numpy(), VERBS[verb](START, np.array([1.0, 4.0])))


def test_118_a_counter_of_the_first_replica_counts_once(strategy):
    counter = variable(strategy, 0, aggregation=FIRST)
    for i in range(1, 4):
        strategy.run(lambda: counter.assign_add(1))
        check(counter, i)


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
@pytest.mark.parametrize("zero", [0, 0.0])
def test_119_zero_may_always_be_reduced(strategy, aggregation, zero):
    v = variable(strategy, 3.0, aggregation=aggregation)
    strategy.run(lambda: v.assign_add(zero))
    check(v, 3.0)
    strategy.run(lambda: v.assign(zero))
    check(v, 0.0)


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
@pytest.mark.parametrize("verb", VERBS)
def test_120_an_update_assigns_one_component_only(strategy, synchronization, aggregation, verb):
    v = variable(strategy, aggregation=aggregation, synchronization=synchronization)
    new = VERBS[verb](START, np.array([6.0, 6.0])).tolist()
    places = len(v.copies)
    done = []

    def fn(w):
        getattr(w, verb)(np.array([6.0, 6.0]))
        assert w.numpy().tolist() == new
        done.append(w.handle)
        assert components(v) == [new] * len(done) + [START.tolist()] * (places - len(done))

    strategy.update(v, fn)
    assert done == list(v.copies)


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
@pytest.mark.parametrize("verb", VERBS)
def test_121_what_assigning_returns_is_like_a_tensor(strategy, synchronization, verb):
    v = variable(strategy, 4.0, aggregation=MEAN, synchronization=synchronization)
    new = VERBS[verb](4.0, 2.0)

    def step():
        result = getattr(v, verb)(2.0)
        assert (result.shape, result.dtype, result.ndim) == ((), np.float32, 0)
        assert float(result) == float(np.asarray(result)) == result.item() == new
        assert float(result + 1.0) == float(1.0 + result) == new + 1
        assert float(md.ops.square(result)) == new * new
        assert float(np.from_dlpack(result)) == new
        return result.read()

    assert [float(value) for value in in_each(strategy, step)] == [new] * strategy.num_replicas


def test_121_a_variable_converts_as_what_it_reads_as(two):
    v = variable(two, np.arange(3))
    assert int(v[2]) == 2 and len(v) == 3 and [int(x) for x in v] == [0, 1, 2]
    assert [10, 11, 12][variable(two, 2)] == 12
    assert bool(variable(two, 0.0)) is False
    assert (np.ones(3, int) + v).numpy().tolist() == [1, 2, 3]
    assert [int(c + 1) for c in variable(two, 1).copies] == [2, 2]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_122_every_form_of_the_call_is_accepted(strategy, synchronization, verb):
    v = variable(strategy, 2.0, aggregation=MEAN, synchronization=synchronization)
    forms = [
        lambda assign: assign(3.0),
        lambda assign: assign(3.0, True),
        lambda assign: assign(3.0, False, "name"),
        lambda assign: assign(3.0, False, "name", True),
        lambda assign: assign(3.0, False, "name", False),
        lambda assign: assign(3.0, use_locking=True),
        lambda assign: assign(value=3.0, name="name", use_locking=True, read_value=False),
    ]
    for form in forms:
        for each in (lambda fn: fn(), strategy.run, lambda fn: strategy.update(v, lambda w: fn())):
            v.assign(2.0)
            each(lambda form=form: form(getattr(v, verb)))
            check(v, VERBS[verb](2.0, 3.0))


# --- on read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_123_on_read_a_replica_assigns_its_own_component(strategy, n, aggregation):
    v = variable(strategy, 1.0, synchronization=ON_READ, aggregation=aggregation)

    def step():
        i = replica_id()
        if i == n - 1:  # no meeting: one replica may do it alone
            v.assign_sub(0.5)
        for _ in range(i):
            v.assign_add(1.0)
        if i == 1:
            v.assign(10.0)
        return float(v)

    expected = [1.0 + i for i in range(n)]
    expected[n - 1] -= 0.5
    expected[1:2] = [10.0][: n - 1]
    assert in_each(strategy, step) == expected == components(v)


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_124_assigned_for_all_a_sum_is_shared_out(strategy, n, aggregation):
    v = variable(strategy, START, synchronization=ON_READ, aggregation=aggregation)
    each = np.array([6.0, 3.0]) / n if aggregation is SUM else np.array([6.0, 3.0])
    for value in [np.array([6.0, 3.0]), [6, 3], md.constant(np.array([6.0, 3.0]))]:
        v.assign(START)
        v.assign(value)
        assert components(v) == [each.tolist()] * n
    whole = variable(strategy, [7, -7], synchronization=ON_READ, aggregation=SUM)
    whole.assign([7, -7])
    assert np.sum(components(whole), axis=0).tolist() == whole.numpy().tolist() == [7, -7]
    assert np.ptp(components(whole), axis=0).max() <= 1


@pytest.mark.parametrize("verb", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_125_a_sum_cannot_be_added_to_for_all(strategy, n, aggregation, verb):
    v = variable(strategy, 2.0, synchronization=ON_READ, aggregation=aggregation)
    if aggregation is SUM:
        for scope in (strategy.scope(), md.device("cpu:0")):
            with scope, pytest.raises(ValueError, match="'v' is the sum"):
                getattr(v, verb)(1.0)
        assert components(v) == [2.0] * n
    else:
        getattr(v, verb)(1.0)
        assert components(v) == [VERBS[verb](2.0, 1.0)] * n


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_126_read_for_all_the_components_are_aggregated(strategy, n, aggregation):
    v = variable(strategy, synchronization=ON_READ, aggregation=aggregation)
    strategy.run(lambda: v.assign_add(np.array([replica_id(), 1.0])))
    expected = MERGED[aggregation]([np.array([10.0 + i, 21.0]) for i in range(n)])
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-15)
    with strategy.scope():
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-15)
    merged = strategy.run(lambda: md.get_replica_context().merge_call(lambda s: v.numpy()))
    np.testing.assert_allclose(md.local_results(merged)[0], expected, rtol=1e-15)


def test_126_without_aggregation_only_one_component_can_be_read_for_all(strategy, n):
    v = variable(strategy, synchronization=ON_READ)
    for read in (v.numpy, v.to_save, lambda: v + 1.0):
        if n == 1:
            read()
        else:
            with pytest.raises(ValueError, match=rf"'v' has {n} copies.*aggregation"):
                read()
    assert [read.tolist() for read in in_each(strategy, v.numpy)] == [START.tolist()] * n


@pytest.mark.parametrize(
    ("value", "aggregation", "allowed"),
    [
        (1, MEAN, False),
        (True, MEAN, False),
        (True, SUM, False),
        (1, SUM, True),
        (True, FIRST, True),
        (1, NONE, True),
        (1.0, MEAN, True),
    ],
)
def test_126_what_cannot_be_aggregated_is_not_made(two, value, aggregation, allowed):
    def create():
        return md.Variable(value, name="v", synchronization=ON_READ, aggregation=aggregation)

    if allowed:
        assert two.run(create).synchronization is ON_READ
    else:
        with pytest.raises(TypeError, match=r"'v'.*ON_READ"):
            two.run(create)
        with two.scope(), pytest.raises(TypeError, match=r"'v'.*ON_READ"):
            create()


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_127_all_ways_of_reading_for_all_agree(strategy, synchronization, aggregation):
    v = variable(strategy, synchronization=synchronization, aggregation=aggregation)
    v.assign(np.array([30.0, 60.0]))
    ways = [
        v.read,
        v.read_value,
        lambda: v,
        v.numpy,
        lambda: md.ops.as_tensor(v),
        lambda: v * 1.0,
        lambda: md.constant(v),
        v.to_save,
    ]
    with strategy.scope():
        for way in ways:
            np.testing.assert_allclose(np.asarray(way()), [30.0, 60.0], rtol=1e-15)


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_128_one_object_with_a_component_for_each_replica(mirrored, n, synchronization):
    made = in_each(mirrored, lambda: md.Variable(START, synchronization=synchronization))
    v = made[0]
    assert all(other is v for other in made)
    mine = in_each(mirrored, v.get)
    assert mine == list(v.copies) and len(set(map(id, mine))) == n
    for i in range(n):
        assert v.get(f"cpu:{i}") is v.get(v.copies[i].device.name) is v.copies[i]
    with pytest.raises(ValueError, match=rf"no copy on cpu:{n}"):
        v.get(f"cpu:{n}")
    assert mirrored.run(v.get) is v  # and back again


def test_128_a_component_outlives_its_variable(mirrored):
    v = variable(mirrored)
    component = v.copies[0]
    assert component.container is v
    del v
    gc.collect()
    assert component.container is None
    np.testing.assert_array_equal(component.numpy(), START)


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_129_an_update_gives_each_component_its_value(strategy, n, aggregation):
    v = variable(strategy, synchronization=ON_READ, aggregation=aggregation)
    strategy.update(v, lambda w: w.assign(np.array([2.0, 3.0])))
    assert components(v) == [[2.0, 3.0]] * n
    np.testing.assert_allclose(v.numpy(), MERGED[aggregation]([np.array([2.0, 3.0])] * n))


@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device"])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("verb", VERBS)
def test_130_one_variable_for_all_is_updated_once(strategy, n, verb):
    for aggregation, merge in MERGED.items():
        v = variable(strategy, aggregation=aggregation)
        assert type(v) is md.AggregatingVariable
        (only,) = v.copies
        written = only.version
        strategy.run(lambda v=v: getattr(v, verb)(np.array([replica_id() + 1.0, 4.0])))
        assert only.version == written + 1
        merged = merge([np.array([i + 1.0, 4.0]) for i in range(n)])
        check(v, VERBS[verb](START, merged))
        assert in_each(strategy, v.get) == [only] * n
        assert v.handle is v.get() is v.get("cpu:1") is only
        getattr(v.assign(START), verb)(START)
        check(v, VERBS[verb](START, START))
    v = variable(strategy)
    with pytest.raises(ValueError, match=r"'v'.*aggregation"):
        strategy.run(lambda: getattr(v, verb)(START))


@pytest.mark.parametrize("synchronization", [AUTO, ON_WRITE])
def test_131_a_mean_of_integers_is_an_error_and_a_sum_is_not(strategy, n, synchronization):
    v = variable(strategy, 10, aggregation=MEAN, synchronization=synchronization)
    if type(v) is not md.Variable:
        with pytest.raises(TypeError, match=r"'v'.*int64"):
            strategy.run(lambda: v.assign_add(md.constant(replica_id())))
    check(v, 10)
    v = variable(strategy, 10, aggregation=SUM, synchronization=synchronization)
    strategy.run(lambda: v.assign_add(md.constant(replica_id() + 1)))
    check(v, 10 + n * (n + 1) // 2)


# --- what the rules leave open ------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_replicas_that_assign_differently_are_an_error(strategy):
    v, w = variable(strategy, aggregation=MEAN), variable(strategy, name="w", aggregation=MEAN)
    with pytest.raises(MergeMismatchError, match=r"different variables: 'v', 'w'"):
        strategy.run(lambda: (v, w)[min(replica_id(), 1)].assign(START))
    with pytest.raises(MergeMismatchError, match="in different ways"):
        strategy.run(lambda: v.assign_add(START) if replica_id() else v.assign_sub(START))
    check(v, START)


def test_a_replica_assigns_what_a_variable_is_to_it(strategy, n):
    own = variable(strategy, synchronization=ON_READ)
    strategy.run(lambda: own.assign_add(np.array([replica_id(), 0.0])))
    for aggregation, merge in MERGED.items():
        v = variable(strategy, 0 * START, aggregation=aggregation)
        strategy.run(lambda v=v: v.assign(own))
        check(v, merge([START + np.array([i, 0.0]) for i in range(n)]))


def test_a_replica_assigns_its_component_of_a_distributed_value(strategy, n):
    parts = [np.array([i, 1.0]) for i in range(n)]
    value = md.PerReplica(strategy.devices, parts)
    v = variable(strategy, aggregation=SUM)
    own = variable(strategy, synchronization=ON_READ)
    strategy.run(lambda: (v.assign(value), own.assign(value))[0])
    check(v, sum(parts))
    assert components(own) == [part.tolist() for part in parts]


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_mirrored_value_is_assigned_by_component_or_else_its_first(strategy, synchronization):
    v = variable(strategy, aggregation=MEAN, synchronization=synchronization)
    value = md.Mirrored(md.devices(["cpu:8", "cpu:9"]), [START + 1, START + 1])
    v.assign(value)
    check(v, START + 1)
    v.assign(START)
    strategy.update(v, lambda w: w.assign(value))
    check(v, START + 1)
    own = md.Mirrored(
        strategy.devices, [np.array([float(i), 0.0]) for i in range(len(strategy.devices))]
    )
    v.assign(own)
    assert components(v) == [[float(i), 0.0] for i in range(len(v.copies))]


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_wrong_value_changes_nothing(strategy, synchronization):
    v = variable(strategy, aggregation=MEAN, synchronization=synchronization)
    wrong = [np.ones(3), md.constant(np.ones((2, 1))), md.constant(np.ones(2, "float32")), "x"]
    for value in wrong:
        for verb in VERBS:
            with pytest.raises((ShapeError, UsageError, TypeError)):
                getattr(v, verb)(value)
    with pytest.raises(ShapeError, match="'v'"):
        v.restore(np.ones(3))
    check(v, START)


def test_in_a_replica_nothing_is_saved_or_restored(strategy):
    v = variable(strategy)
    with pytest.raises(ContextError, match="'v' cannot be saved"):
        strategy.run(v.to_save)
    with pytest.raises(ContextError, match="'v' cannot be restored"):
        strategy.run(lambda: v.restore(START))


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_what_is_saved_is_restored_for_any_number_of_replicas(synchronization, aggregation):
    options = {"synchronization": synchronization, "aggregation": aggregation}
    with md.Strategy("cpu*2") as two, md.Strategy("cpu*4", "parameter_server") as four:
        v, w = variable(two, **options), variable(four, 0 * START, **options)
        saved = v.to_save()
        np.testing.assert_array_equal(saved, v.numpy())
        w.restore(saved)
        np.testing.assert_array_equal(w.numpy(), saved)
        v.restore(saved.astype(np.float32))
        np.testing.assert_array_equal(v.numpy(), saved)
        saved[:] = 0
        np.testing.assert_array_equal(v.numpy(), w.numpy())


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_reading_an_on_read_variable_in_a_replica_is_differentiable(strategy, n, aggregation):
    v = variable(strategy, 3.0, synchronization=ON_READ, aggregation=aggregation, trainable=True)

    def step():
        v.assign_add(float(replica_id()))
        with md.GradientTape() as tape:
            loss = v * v
        return float(tape.gradient(loss, v))

    assert in_each(strategy, step) == [2 * (3.0 + i) for i in range(n)]


def test_read_for_all_an_aggregated_value_is_differentiable_too(two):
    v = variable(two, 3.0, synchronization=ON_READ, aggregation=SUM, trainable=True)
    with two.scope(), md.GradientTape() as tape:
        loss = v * v
    assert float(tape.gradient(loss, v)) == 12.0


def test_on_read_with_no_strategy_is_a_variable_like_any_other():
    for aggregation in (NONE, SUM, MEAN, FIRST):
        v = md.Variable(START, synchronization=ON_READ, aggregation=aggregation)
        assert not v.trainable and len(v.copies) == 1
        v.assign(START + 1).assign_add(START).assign_sub(START)
        np.testing.assert_array_equal(v.numpy(), START + 1)
