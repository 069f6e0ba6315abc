"""Rules 1 to 23: contexts and scopes, under no strategy, in a scope, in replicas and in between."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
from policies import replica_id

import minidist as md
from minidist.errors import ContextError

COUNTS = [1, 2, 3]


@pytest.fixture(params=COUNTS, ids=lambda n: f"{n} replicas")
def strategy(request):
    with md.Strategy(f"cpu*{request.param}") as strategy:
        yield strategy


@pytest.fixture(autouse=True)
def leaves_the_default_state():
    yield
    assert_default_state()


def assert_default_state():
    assert md.get_replica_context() is not None
    assert md.get_replica_context().strategy is md.get_strategy()
    assert md.get_cross_replica_context() is None
    assert not md.in_cross_replica_context()
    assert not md.has_strategy()


def assert_in_scope_of(strategy):
    assert md.get_replica_context() is None
    assert md.get_cross_replica_context() is strategy
    assert md.get_strategy() is strategy
    assert md.in_cross_replica_context()
    assert md.has_strategy()


def assert_in_replica_of(strategy):
    assert md.get_replica_context() is not None
    assert md.get_replica_context().strategy is strategy
    assert md.get_cross_replica_context() is None
    assert md.get_strategy() is strategy
    assert not md.in_cross_replica_context()
    assert md.has_strategy()


# --- which context it is ------------------------------------------------------------------------


def test_001_without_a_scope_the_default_strategy_and_its_replica_are_there():
    assert_default_state()
    assert md.get_replica_context().replica_id == 0
    assert md.get_replica_context().num_replicas == 1


def test_002_in_a_scope_the_strategy_is_the_cross_replica_context(strategy):
    with strategy.scope():
        assert_in_scope_of(strategy)


def test_003_004_a_function_in_run_has_a_replica_context_with_or_without_a_scope(strategy):
    strategy.run(assert_in_replica_of, strategy)
    assert_default_state()
    with strategy.scope():
        strategy.run(assert_in_replica_of, strategy)
        assert_in_scope_of(strategy)


def test_005_exactly_one_of_the_two_contexts_is_there(strategy):
    def check(*_):
        assert (md.get_replica_context() is None) is md.in_cross_replica_context()
        assert (md.get_replica_context() is None) is (md.get_cross_replica_context() is not None)

    def fn():
        check()
        md.get_replica_context().merge_call(check)
        check()

    check()
    strategy.run(fn)
    md.get_replica_context().merge_call(check)
    with strategy.scope():
        check()
        v = md.Variable(1.0)
        strategy.update(v, check)


def test_006_merge_call_of_the_default_replica_calls_at_once():
    def merge(s, a, *, b):
        assert s is md.get_strategy()
        assert md.get_cross_replica_context() is s
        assert md.get_replica_context() is None
        assert not md.has_strategy()
        return a, b

    assert md.get_replica_context().merge_call(merge, 1, b=2) == (1, 2)


def test_007_the_state_is_restored_after_a_merge_function_that_raises(strategy):
    with pytest.raises(ZeroDivisionError):
        md.get_replica_context().merge_call(lambda s: 1 / 0)
    assert_default_state()

    def fn():
        try:
            md.get_replica_context().merge_call(lambda s: 1 / 0)
        finally:
            assert_in_replica_of(strategy)

    with pytest.raises(ZeroDivisionError):
        strategy.run(fn)
    strategy.run(assert_in_replica_of, strategy)


def test_008_merge_call_in_cross_replica_context_says_where_it_must_be_used(strategy):
    default = md.get_replica_context()

    def nested(s, replica):
        with pytest.raises(RuntimeError, match="merge_call must be used inside run"):
            md.local_results(replica)[0].merge_call(lambda s: None)

    strategy.run(lambda: md.get_replica_context().merge_call(nested, md.get_replica_context()))
    default.merge_call(nested, default)
    with strategy.scope(), pytest.raises(RuntimeError, match="must be used inside run"):
        default.merge_call(lambda s: None)


def test_009_a_replica_context_that_is_not_the_active_one_is_an_error(strategy):
    default = md.get_replica_context()
    (old, *_) = md.local_results(strategy.run(md.get_replica_context))
    with pytest.raises(RuntimeError, match="Mismatching strategies"):
        old.merge_call(lambda s: None)

    def fn():
        with pytest.raises(RuntimeError, match="Mismatching ReplicaContext"):
            old.merge_call(lambda s: None)
        with pytest.raises(RuntimeError, match="Mismatching strategies"):
            default.merge_call(lambda s: None)
        with pytest.raises(RuntimeError, match="Mismatching ReplicaContext"):
            old.all_reduce("sum", 1.0)

    strategy.run(fn)


VERBS = {
    "run": lambda s, v: s.run(lambda: None),
    "reduce": lambda s, v: s.reduce("mean", 1.0),
    "broadcast": lambda s, v: s.broadcast(1.0),
    "batch_reduce": lambda s, v: s.batch_reduce("mean", [(1.0, "cpu")]),
    "gather": lambda s, v: s.gather(md.PerReplica(s.devices, [np.ones(1)] * s.num_replicas), 0),
    "update": lambda s, v: s.update(v, lambda v: None),
    "update_non_slot": lambda s, v: s.update_non_slot([v], lambda: None),
    "run_steps": lambda s, v: s.run_steps(lambda ctx, x: None, batches(s)),
}


def batches(strategy):
    """Return a data set of one batch."""
    with md.context.entered(replica=None, strategy=strategy):
        return strategy.distribute_dataset([np.ones(strategy.num_replicas)])


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return md.Variable(1.0)


@pytest.mark.parametrize("verb", VERBS)
def test_010_what_acts_for_all_is_an_error_in_a_replica_that_advises_merge_call(
    strategy, variable, verb
):
    with pytest.raises(RuntimeError, match=rf"{verb} was called in replica .*merge_call"):
        strategy.run(lambda: VERBS[verb](strategy, variable))


@pytest.mark.parametrize("verb", VERBS)
def test_011_it_works_in_no_scope_and_in_its_own_but_not_in_another_ones(strategy, variable, verb):
    VERBS[verb](strategy, variable)
    with strategy.scope():
        VERBS[verb](strategy, variable)
    md.get_replica_context().merge_call(lambda _: VERBS[verb](strategy, variable))
    with (
        md.Strategy("cpu*2") as other,
        other.scope(),
        pytest.raises(RuntimeError, match="Mixing different Strategy objects"),
    ):
        VERBS[verb](strategy, variable)


# --- scopes in scopes ---------------------------------------------------------------------------


def test_012_a_strategys_scope_may_be_entered_inside_itself(strategy):
    scope = strategy.scope()
    with scope:
        with scope, strategy.scope():
            assert_in_scope_of(strategy)
        assert_in_scope_of(strategy)
        with md.device(strategy.devices[-1]), scope:
            assert md.constant(1.0).device is strategy.devices[-1]  # and changes nothing
    assert_default_state()

    def merge(s):
        with scope:
            assert_in_scope_of(strategy)
        assert_in_scope_of(strategy)

    strategy.run(lambda: md.get_replica_context().merge_call(merge))


def test_013_another_strategys_scope_inside_a_scope_is_an_error(strategy):
    with md.Strategy("cpu*2") as other:
        made_outside = other.scope()
        with strategy.scope():
            with pytest.raises(RuntimeError, match="Mixing"):
                other.scope()
            with pytest.raises(RuntimeError, match="Mixing"), made_outside:
                pass
            assert_in_scope_of(strategy)


def test_014_set_strategy_is_a_scope_without_an_end(strategy):
    md.set_strategy(strategy)
    try:
        assert_in_scope_of(strategy)
        variable = md.Variable(1.0)
        assert variable.strategy is strategy
        strategy.run(assert_in_replica_of, strategy)
        with strategy.scope(), md.name_scope("inner"):
            assert_in_scope_of(strategy)
        with md.Strategy("cpu*2") as other:
            with pytest.raises(RuntimeError, match="Mixing"):
                other.run(lambda: None)
            md.set_strategy(other)  # in its place
            assert_in_scope_of(other)
            md.set_strategy(strategy)
        assert_in_scope_of(strategy)
        elsewhere = threading.Thread(target=assert_default_state)  # states belong to threads
        elsewhere.start()
        elsewhere.join()
    finally:
        md.set_strategy(None)
    assert_default_state()
    md.set_strategy(md.get_strategy())
    assert_default_state()


def test_014_set_strategy_takes_a_strategy_or_none():
    with pytest.raises(ValueError, match="set_strategy takes a Strategy, or None, not 'cpu'"):
        md.set_strategy("cpu")


def test_015_set_strategy_inside_a_scope_or_a_run_is_an_error(strategy):
    def refused(*_):
        for value in (strategy, None):
            with pytest.raises(RuntimeError, match="set_strategy must not be called inside"):
                md.set_strategy(value)

    with strategy.scope():
        refused()
        assert_in_scope_of(strategy)
    with md.name_scope("here"):
        refused()
    strategy.run(refused)
    strategy.run(lambda: md.get_replica_context().merge_call(refused))
    md.get_replica_context().merge_call(refused)
    md.set_strategy(strategy)
    with md.device("cpu:0"):
        refused()
    md.set_strategy(None)


INNER = {
    "016 device": lambda: md.device("cpu:0"),
    "017 creator": lambda: md.variable_creator_scope(lambda make, **kwargs: make(**kwargs)),
    "name": lambda: md.name_scope("name"),
    "dtype": lambda: md.default_dtype("float64"),
}


@pytest.mark.parametrize("inner", INNER)
def test_016_017_leaving_a_scope_while_an_inner_one_is_open_is_an_error(strategy, inner):
    scope = strategy.scope()
    scope.__enter__()
    with INNER[inner]():
        with pytest.raises(RuntimeError, match="nesting error"):
            scope.__exit__(None, None, None)
        assert_in_scope_of(strategy)  # nothing was left
    scope.__exit__(None, None, None)  # in the right order it is fine
    assert_default_state()
    with pytest.raises(RuntimeError, match=r"nesting error.*not open in this thread"):
        scope.__exit__(None, None, None)


def test_016_an_exception_on_its_way_out_leaves_all_scopes_inside(strategy):
    def fails():
        md.device("cpu:0").__enter__()
        raise KeyError

    with pytest.raises(KeyError), strategy.scope():
        fails()
    assert_default_state()


def test_016_a_scope_of_a_dropped_generator_leaves_other_threads_alone(strategy):
    def generator():
        with strategy.scope():
            yield

    held = [generator()]
    opened = threading.Thread(target=lambda: next(held[0]))
    opened.start()
    opened.join()
    with md.name_scope("mine"):
        held.clear()
        gc.collect()  # the generator's scope is closed here, in a thread that never opened it
        assert_default_state()


def test_016_one_scope_object_serves_several_threads_at_once(strategy):
    scope = md.name_scope("shared")
    names = strategy.run(lambda: [names_in(scope) for _ in range(20)])
    for i in range(strategy.num_replicas):
        before = f"replica_{i}/" if i else ""
        assert md.select_replica(i, names) == [f"{before}shared/x"] * 20


def names_in(scope):
    """Return the name that a variable would get in a scope, having met the others inside."""
    with scope, md.variable_creator_scope(lambda _, **options: options["name"]):
        md.get_replica_context().merge_call(lambda s: None)
        return md.Variable(1.0, name="x")


def test_019_the_default_strategys_scope_changes_nothing(strategy):
    default = md.get_strategy()
    scope = default.scope()
    with scope:
        assert_default_state()
        assert md.Variable(1.0).strategy is default
        with strategy.scope(), pytest.raises(RuntimeError, match=r"Mixing.*variable 'wrong'"):
            md.Variable(1.0, name="wrong")
        with scope:
            assert_default_state()
            with pytest.raises(RuntimeError, match=r"Mixing.*variable"):
                strategy.run(lambda: md.Variable(1.0))
        assert_default_state()
    with strategy.scope():
        assert md.Variable(1.0).strategy is strategy
        with pytest.raises(RuntimeError, match="Mixing"), default.scope():
            pass


# --- strategies ---------------------------------------------------------------------------------


def test_020_a_copy_is_an_error_and_a_deep_copy_a_strategy_of_its_own():
    with md.Strategy("cpu*2", "parameter_server", local_parameter_device="cpu") as strategy:
        with pytest.raises(RuntimeError, match="copied"):
            copy.copy(strategy)
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(strategy)
        strategy.run(lambda: None)
        with copy.deepcopy([strategy])[0] as other:
            assert other is not strategy
            assert other.devices == strategy.devices
            assert other.step == strategy.step == 1
            with other.scope():
                variable = md.Variable([1.0, 2.0])
                assert variable.strategy is other
            assert repr(other) == repr(strategy)
            assert md.local_results(other.run(replica_id)) == (0, 1)
            with strategy.scope(), pytest.raises(RuntimeError, match="Mixing"):
                other.run(replica_id)
            made_of_parts = md.Strategy("cpu*2", other.variable_mgr)
            with made_of_parts, pytest.raises(RuntimeError, match="VariableMgr"):
                copy.deepcopy(made_of_parts)
    assert copy.deepcopy(md.get_strategy()) is md.get_strategy()


def test_021_a_creator_sees_the_defaults_and_gets_what_is_given_unchanged(strategy):
    seen = []

    def creator(make, **options):
        seen.append((options["synchronization"], options["aggregation"]))
        return make(**options)

    sync, how = md.VariableSynchronization, md.VariableAggregation
    with strategy.scope(), md.variable_creator_scope(creator):
        md.Variable(1.0)
        md.Variable(1.0, synchronization=sync.ON_WRITE, aggregation=how.MEAN)
    assert seen == [(sync.AUTO, how.NONE), (sync.ON_WRITE, how.MEAN)]


def test_022_the_default_strategy_has_one_replica_and_does_everything_once():
    default = md.get_strategy()
    assert default.num_replicas == 1
    assert default.run(lambda x, *, y: (x, y), 1, y=2) == (1, 2)
    assert default.reduce("sum", 3.0) == default.reduce("mean", 3.0) == 3.0

    def merge(s):
        assert md.in_cross_replica_context()
        return s.run(md.get_replica_context)

    replica = md.get_replica_context()
    assert replica.merge_call(merge) is replica
    assert replica.all_reduce("sum", {"a": 2, "b": [3.0]}) == {"a": 2, "b": [3.0]}
    variables = [md.Variable(1.0, name=name) for name in "ba"]
    with md.device("cpu:3"):
        assert (md.Variable(1.0) + md.constant(1.0)).device.short == "cpu:3"
    devices = []
    default.update_non_slot(variables, lambda: devices.append(md.get_update_device()))
    assert devices == [variables[1].copies[0].device]


def test_023_colocate_vars_with_takes_a_variable_of_the_strategy(strategy):
    with strategy.scope():
        variable = md.Variable(1.0)
        with strategy.colocate_vars_with(variable):
            beside = md.Variable(2.0)
        assert [c.device for c in beside.copies] == [c.device for c in variable.copies]
        for wrong in (1.0, "w", None, [variable]):
            with pytest.raises(ValueError, match="colocate_vars_with"):
                strategy.colocate_vars_with(wrong)
    with md.Strategy("cpu*2") as other, pytest.raises(ValueError, match="colocate_vars_with"):
        other.colocate_vars_with(variable)


@pytest.mark.parametrize(
    "options",
    [{"deadline": 0}, {"deadline": -1.0}, {"deadline": float("nan")}, {"report_after": "x"}],
)
def test_options_of_a_strategy_that_make_no_sense_are_errors(options):
    with pytest.raises(ValueError, match="seconds"):
        md.Strategy("cpu*2", **options)


@pytest.mark.parametrize("seed", [1.5, -1, 2**64, "7", None])
def test_a_seed_is_an_integer_of_64_bits(seed):
    with pytest.raises(ValueError, match="seed"):
        md.random.seed(seed)


def test_names_of_scopes_are_strings():
    for wrong in ("", None, 3):
        with pytest.raises(ValueError, match="name scope"):
            md.name_scope(wrong)
    assert issubclass(ContextError, RuntimeError)
