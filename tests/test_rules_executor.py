"""Rules 26 to 61, 158 and 159: what a run gives its replicas, their meetings, and how it ends."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import namedtuple

import numpy as np
import pytest
from policies import replica_id

import minidist as md
from minidist.errors import MergeMismatchError, StructureError

COUNTS = [1, 2, 3, 5]


@pytest.fixture(params=[True, False], ids=["concurrent", "turns"])
def concurrent(request):
    return request.param


@pytest.fixture(params=COUNTS, ids=lambda n: f"{n} replicas")
def strategy(request, concurrent):
    with md.Strategy(f"cpu*{request.param}", concurrent=concurrent) as strategy:
        yield strategy


@pytest.fixture
def several(concurrent):
    with md.Strategy("cpu*3", concurrent=concurrent) as strategy:
        yield strategy


def merge_call(fn, *args, **kwargs):
    return md.get_replica_context().merge_call(fn, *args, **kwargs)


def per_replica(strategy, values):
    return md.PerReplica(strategy.devices, values)


def each(strategy, result):
    """Return what each replica has of a result, in order."""
    return [md.select_replica(i, result) for i in range(strategy.num_replicas)]


# --- arguments, results, meetings ---------------------------------------------------------------


def test_026_without_concurrency_replicas_take_turns_until_they_meet():
    with md.Strategy("cpu*3", concurrent=False) as strategy:
        log = []

        def fn():
            log.append(replica_id())
            merge_call(lambda s: log.append("merge"))
            log.append(replica_id())

        strategy.run(fn)
    assert log == [0, 1, 2, "merge", 0, 1, 2]


def test_027_each_replica_gets_its_own_component_and_all_else_as_it_is(strategy):
    n, shared = strategy.num_replicas, object()
    numbers = per_replica(strategy, list(range(n)))
    array = np.ones(3)

    def fn(own, nested, plain, *, word, key):
        assert plain is shared
        assert word is array
        return own, nested["a"][1], nested["b"], key

    result = strategy.run(
        fn, numbers, {"a": (shared, numbers), "b": 7}, shared, word=array, key=[numbers]
    )
    assert each(strategy, result) == [(i, i, 7, [i]) for i in range(n)]


def test_027_values_of_another_number_of_replicas_are_an_error(strategy):
    for count in (strategy.num_replicas - 1, strategy.num_replicas + 1):
        if count:
            value = md.PerReplica(md.devices(f"cpu*{count}"), list(range(count)))
            with pytest.raises(ValueError, match=r"component"):
                strategy.run(lambda x: x, [value])


def test_028_a_variable_stays_whole(strategy):
    with strategy.scope():
        variable = md.Variable(1.0)
    seen = []
    strategy.run(lambda v, nested: seen.extend([v, nested["v"]]), variable, {"v": variable})
    assert len(seen) == 2 * strategy.num_replicas
    assert all(v is variable for v in seen)


def test_029_numbers_are_each_replicas_own_though_they_be_the_same(strategy):
    """Small numbers are one object in Python, so identity would depend on the value."""
    for number in (5, 5.0, True, 10**6, np.float32(2).item()):
        result = strategy.run(lambda number=number: {"x": [number]})
        assert each(strategy, result) == [{"x": [number]}] * strategy.num_replicas
        if strategy.num_replicas > 1:
            assert isinstance(result["x"][0], md.PerReplica)
        assert strategy.reduce("sum", result)["x"][0] == number * strategy.num_replicas
    shared = {"lr": 0.5}
    assert strategy.run(lambda: ("word", None, shared)) == ("word", None, shared)
    assert strategy.run(lambda: [shared])[0] is shared


Pair = namedtuple("Pair", "x y")


def test_029_results_are_regrouped_leaf_by_leaf(strategy):
    shared = object()

    def fn():
        i = replica_id()
        return [{"a": (float(i), None), "b": Pair(shared, [i * 10 + 1000])}]

    result = strategy.run(fn)
    assert each(strategy, result) == [
        [{"a": (float(i), None), "b": Pair(shared, [i * 10 + 1000])}]
        for i in range(strategy.num_replicas)
    ]
    assert result[0]["b"].x is shared
    if strategy.num_replicas > 1:
        assert isinstance(result[0]["b"].y[0], md.PerReplica)


def test_030_results_of_one_run_are_arguments_of_the_next(strategy):
    first = strategy.run(lambda: {"x": replica_id() + 0.5, "same": "word"})
    second = strategy.run(lambda r: (r["x"] * 2, r["same"]), first)
    assert each(strategy, second) == [(2 * i + 1.0, "word") for i in range(strategy.num_replicas)]


def test_031_the_merge_function_of_replica_0_runs_once_with_what_all_brought(strategy):
    n, calls = strategy.num_replicas, []

    def fn():
        mine = replica_id()

        def merge(s, x, *, key):
            calls.append((s, mine, each(s, x), each(s, key)))

        merge_call(merge, [mine + 0.5], key={"k": mine + 0.25})

    strategy.run(fn)
    assert calls == [
        (strategy, 0, [[i + 0.5] for i in range(n)], [{"k": i + 0.25} for i in range(n)])
    ]


def test_032_each_replica_gets_its_own_component_of_a_merge_functions_result(strategy):
    n, shared = strategy.num_replicas, object()

    def merge(s):
        return {
            "own": per_replica(s, [10 + i for i in range(n)]),
            "mirrored": md.Mirrored(s.devices, [20 + i for i in range(n)]),
            "plain": shared,
        }

    results = [None] * n

    def fn():
        results[replica_id()] = merge_call(merge)

    strategy.run(fn)
    assert results == [{"own": 10 + i, "mirrored": 20 + i, "plain": shared} for i in range(n)]


def test_033_034_replica_ids_are_0_to_n_minus_1_and_their_number_is_that_of_devices(strategy):
    n = strategy.num_replicas
    assert n == len(strategy.devices)
    ids = []

    def fn():
        ids.append(replica_id())
        assert md.get_replica_context().num_replicas == n
        assert md.get_strategy().num_replicas == n
        merge_call(lambda s: ids.append(s.num_replicas))

    strategy.run(fn)
    assert sorted(ids) == sorted([*range(n), n])


def test_035_a_different_number_of_merge_calls_is_an_error(several):
    def fn():
        if replica_id() != 2:
            merge_call(lambda s: None)

    with pytest.raises(RuntimeError, match="different number of merge_calls"):
        several.run(fn)


def test_035_also_where_the_replicas_code_catches_it(several):
    def fn():
        try:
            if replica_id() != 2:
                merge_call(lambda s: None)
        except Exception:
            return "caught"

    with pytest.raises(MergeMismatchError, match="replica 2 finished"):
        several.run(fn)


def test_035_also_where_meeting_for_different_things_is_caught(several):
    def fn():
        try:
            merge_call((lambda s: 1) if replica_id() else (lambda s: 2))
        except Exception:
            return "caught"

    with pytest.raises(MergeMismatchError, match="different things"):
        several.run(fn)


# --- exceptions ---------------------------------------------------------------------------------


class Boom(Exception):
    pass


def boom():
    raise Boom("from the depth")


def cases(where, who=0, depth=1):
    """Return a function for run that fails in fn or a merge function of a nested run."""

    def fn():
        if depth == 1:
            if where == "fn" and replica_id() == who:
                boom()
            merge_call(lambda s: boom() if where == "merge" else None)
        else:
            merge_call(lambda s: s.run(cases(where, who, depth - 1)))

    return fn


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("where", ["fn", "merge"])
def test_036_037_038_039_040_exceptions_reach_the_caller_of_run(strategy, where, depth):
    for who in {0, strategy.num_replicas - 1}:
        with pytest.raises(Boom, match="from the depth") as caught:
            strategy.run(cases(where, who, depth))
        assert "boom" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
        assert not md.has_strategy()
        ids = strategy.run(replica_id)
        assert each(strategy, ids) == list(range(strategy.num_replicas))


def test_037_also_where_the_replicas_code_catches_it(strategy):
    def fn():
        with contextlib.suppress(Boom):
            merge_call(lambda s: boom())
        return "caught"

    with pytest.raises(Boom) as caught:
        strategy.run(fn)
    assert any("merge function of merge_call number 1" in n for n in caught.value.__notes__)

    def goes_on():
        fn()
        merge_call(lambda s: None)

    with pytest.raises(Boom):
        strategy.run(goes_on)


def test_040_a_run_in_a_merge_function_sees_its_own_replicas(strategy):
    n = strategy.num_replicas
    threads = []

    def inner(x):
        threads.append(threading.get_ident())
        total = merge_call(lambda s, v: sum(md.local_results(v)), x + replica_id())
        return (total, md.constant(0.0).device)

    def fn():
        threads.append(threading.get_ident())
        base = per_replica(strategy, [0.5] * n)
        return merge_call(lambda s, b: s.run(inner, b), replica_id() + 0.0) and merge_call(
            lambda s: s.run(inner, base)
        )

    result = strategy.run(fn)
    total = n * 0.5 + n * (n - 1) / 2
    assert each(strategy, result) == [(total, device) for device in strategy.devices]
    assert len(threads) == 3 * n


def test_041_the_others_are_woken_and_never_return_from_merge_call(several):
    ended, passed = [], []

    def fn():
        try:
            if replica_id() == 1:
                boom()
            merge_call(lambda s: None)
            passed.append(replica_id())
        finally:
            ended.append(replica_id())

    with pytest.raises(Boom):
        several.run(fn)
    assert passed == []
    assert 1 in ended  # in strict turns replica 2 never began


def test_042_in_turns_replicas_after_one_that_fails_never_begin():
    with md.Strategy("cpu*3", concurrent=False) as strategy:
        began = []

        def fn():
            began.append(replica_id())
            boom()

        with pytest.raises(Boom):
            strategy.run(fn)
    assert began == [0]


@pytest.mark.parametrize(
    "results",
    [([1], [1, 2], [1]), ((1,), [1], (1,)), ({"a": 1}, {"b": 1}, {"a": 1}), ([1], 1, [1])],
    ids=["lengths", "types", "keys", "leaf"],
)
def test_043_results_that_cannot_be_regrouped_are_an_error(several, results):
    with pytest.raises(ValueError, match="structures") as caught:
        several.run(lambda: results[replica_id()])
    assert isinstance(caught.value, StructureError)
    with pytest.raises(ValueError, match="structures"):
        several.run(lambda: merge_call(lambda s, x: None, results[replica_id()]))
    assert each(several, several.run(replica_id)) == [0, 1, 2]


def test_044_merge_call_in_a_thread_that_a_replica_made_is_an_error(strategy):
    def fn():
        context, errors = md.get_replica_context(), []

        def elsewhere():
            try:
                context.merge_call(lambda s: None)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        (error,) = errors
        assert "the replica's own thread" in error

    strategy.run(fn)


# --- what replicas inherit ----------------------------------------------------------------------


def test_045_replicas_inherit_the_callers_scopes_and_give_nothing_back(strategy):
    outer = []

    def creator(make, **options):
        outer.append(options["name"])
        return "made"

    def fn():
        assert md.constant(1.0).dtype == np.float64
        assert np.geterr()["over"] == "raise"
        np.seterr(over="ignore")
        md.default_dtype("float32").__enter__()
        md.name_scope("left open").__enter__()
        tape = md.GradientTape()
        tape.__enter__()
        return md.Variable(1.0, name="v")

    with (
        strategy.scope(),
        md.default_dtype("float64"),
        md.name_scope("main"),
        md.variable_creator_scope(creator),
        np.errstate(over="raise"),
    ):
        for _ in range(2):
            assert each(strategy, strategy.run(fn)) == ["made"] * strategy.num_replicas
        assert np.geterr()["over"] == "raise"
        assert md.constant(1.0).dtype == np.float64
    names = ["main/left open/v"] + [
        f"main/replica_{i}/left open/v" for i in range(1, strategy.num_replicas)
    ]
    assert sorted(outer) == sorted(2 * names)
    assert md.constant(1.0).dtype == np.float32


def test_045_the_default_dtype_is_that_of_constants_variables_and_layers(strategy):
    def dtypes():
        layer = md.nn.Dense(2)
        layer.build((3,))
        made = [md.constant([1.0]), md.Variable(1.0), md.Variable(lambda: [0.5]), *layer.variables]
        kept = [md.constant(1), md.constant(np.float32(1)), md.Variable(np.ones(2, np.float32))]
        return [x.dtype for x in made], [x.dtype for x in kept]

    kept = [np.int64, np.float32, np.float32]
    for dtype in (np.float32, np.float64):
        with md.default_dtype(dtype):
            assert dtypes() == ([dtype] * 5, kept)
            for mine in each(strategy, strategy.run(dtypes)):
                assert mine == ([dtype] * 5, kept)
    for wrong in ("int32", bool):
        with pytest.raises(ValueError, match="default dtype"):
            md.default_dtype(wrong)


def test_046_creator_scopes_are_each_replicas_own_and_survive_a_meeting(strategy):
    def main_creator(make, **options):
        return "main_thread"

    def fn():
        mine = replica_id()

        def creator(make, **options):
            return f"{make(**options)}:thread_{mine}"

        with md.variable_creator_scope(creator):
            first = md.Variable(1.0)
            merge_call(lambda s: None)
            assert md.Variable(1.0) == first
        assert md.Variable(1.0) == "main_thread"
        return first

    with strategy.scope(), md.variable_creator_scope(main_creator):
        result = strategy.run(fn)
    assert each(strategy, result) == [
        f"main_thread:thread_{i}" for i in range(strategy.num_replicas)
    ]


def name_of(name):
    """Return the whole name that a variable would be created with here."""
    with md.variable_creator_scope(lambda make, **options: options["name"]):
        return md.Variable(1.0, name=name)


def test_047_names_are_in_the_replicas_scope_also_after_a_meeting(strategy):
    def fn():
        with md.name_scope("foo"):
            a = name_of("a")
            merge_call(lambda s: None)
            b = name_of("b")
            with md.name_scope("bar"):
                return a, b, name_of(None)

    def expected(outer, i):
        scope = f"{outer}replica_{i}/" if i else outer
        return f"{scope}foo/a", f"{scope}foo/b", f"{scope}foo/bar/Variable"

    with strategy.scope(), md.name_scope("main"):
        inside = strategy.run(fn)
    n = strategy.num_replicas
    assert each(strategy, inside) == [expected("main/", i) for i in range(n)]
    assert each(strategy, strategy.run(fn)) == [expected("", i) for i in range(n)]


def test_048_a_merge_function_runs_in_replica_0s_scopes_on_the_callers_device(strategy):
    creators = []

    def merge(s):
        assert md.constant(1.0).device is strategy.devices[-1]
        return name_of("x"), md.Variable(1.0), md.constant(1.0).dtype

    def fn():
        mine = replica_id()

        def creator(make, **options):
            creators.append(mine)
            return "made"

        with (
            md.name_scope("shared"),
            md.default_dtype("float32" if mine else "float64"),
            md.variable_creator_scope(creator),
        ):
            return merge_call(merge)

    with strategy.scope(), md.name_scope("main"), md.device(strategy.devices[-1]):
        result = strategy.run(fn)
    assert each(strategy, result) == [("main/shared/x", "made", np.float64)] * strategy.num_replicas
    assert creators == [0]


def test_049_a_variable_made_in_a_merge_function_is_named_in_replica_0s_scope(strategy):
    def fn():
        with md.name_scope("foo"):
            return merge_call(lambda s: md.Variable(1.0, name="c"))

    with strategy.scope(), md.name_scope("main"):
        variable = strategy.run(fn)
    assert variable.name == "main/foo/c"
    assert [copy.name for copy in variable.copies] == ["main/foo/c"] + [
        f"main/foo/c/replica_{i}" for i in range(1, strategy.num_replicas)
    ]


def test_052_the_device_is_the_replicas_and_afterwards_the_callers(strategy):
    def fn():
        before = md.constant(1.0).device
        merge_call(lambda s: None)
        with md.device("cpu:7"):
            merge_call(lambda s: None)
            assert md.constant(1.0).device.short == "cpu:7"
        assert md.constant(1.0).device is before is md.get_replica_context().device
        return before

    with md.device("cpu:9"):
        assert each(strategy, strategy.run(fn)) == list(strategy.devices)
        assert md.constant(1.0).device.short == "cpu:9"


def test_056_side_effects_happen_though_results_are_ignored(strategy):
    with strategy.scope():
        variable = md.Variable(1.0, aggregation=md.VariableAggregation.MEAN)
    strategy.run(lambda: variable.assign_add(replica_id() + 1.0))
    assert variable.numpy() == 1 + (strategy.num_replicas + 1) / 2


@pytest.mark.parametrize("devices", [[], "", ["cpu:0", "CPU:0"], "cpu:1,1", "gpux*2"])
def test_058_no_devices_and_duplicates_are_errors(devices):
    with pytest.raises(ValueError, match="device"):
        md.Strategy(devices)


def test_060_runs_and_strategies_share_no_state(strategy, concurrent):
    """Random numbers, scopes, tapes and failures of one run are not another one's."""

    def fn(fails):
        first = md.random.stream(3).uniform((2,)).tolist()
        md.device("cpu:8").__enter__()
        tape = md.GradientTape()
        tape.__enter__()
        watched = md.constant(1.0)
        tape.watch(watched)
        if fails:
            boom()
        return first, md.constant(0.0).device.short

    with md.Strategy(strategy.devices, concurrent=concurrent) as other:
        results = []
        for s in (strategy, other):
            with pytest.raises(Boom):
                s.run(fn, True)
            results.append(each(s, s.run(fn, False)))  # step 2 of either
        assert results[0] == results[1]
        if strategy.num_replicas > 1:
            assert results[0][0][0] != results[0][1][0]


def test_061_gradients_in_a_replica_are_its_own(strategy):
    with strategy.scope():
        w = md.Variable([1.0, 2.0])

    def fn():
        with md.GradientTape() as tape:
            loss = md.ops.reduce_sum(md.ops.square(w) * (replica_id() + 1.0))
        return tape.gradient(loss, w).numpy()

    for i, gradient in enumerate(each(strategy, strategy.run(fn))):
        np.testing.assert_array_equal(gradient, [2.0 * (i + 1), 4.0 * (i + 1)])


# --- all_reduce ---------------------------------------------------------------------------------


def in_each(strategy, fn):
    """Return what fn returns in each replica, as it is there."""
    results = [None] * strategy.num_replicas

    def keep():
        results[replica_id()] = fn()

    strategy.run(keep)
    return results


@pytest.mark.parametrize("op", ["sum", "mean", md.ReduceOp.SUM, md.ReduceOp.MEAN])
def test_158_all_reduce_gives_the_sum_or_mean_to_every_replica(strategy, op):
    n = strategy.num_replicas
    scale = 1 if op in ("sum", md.ReduceOp.SUM) else 1 / n
    right = n * (n + 1) / 2 * scale
    with strategy.scope():
        variable = md.Variable([3.0, 3.0], synchronization=md.VariableSynchronization.ON_READ)

    def fn():
        own, ctx = replica_id() + 1.0, md.get_replica_context()
        variable.assign([own, own])
        tensor = md.constant([own, own])
        given = {"t": tensor, "n": (own, np.full(3, own)), "v": [variable], "none": []}
        result = ctx.all_reduce(op, given)
        assert result["t"].device is result["n"][1].device is result["v"][0].device is ctx.device
        together = result["t"] + tensor  # would not do on another device
        arrays = (result["t"], *result["n"], *result["v"], together)
        return [np.asarray(array).tolist() for array in arrays], result["none"]

    for i, (arrays, none) in enumerate(in_each(strategy, fn)):
        sums = [[right] * 2, right, [right] * 3, [right] * 2, [right + i + 1] * 2]
        assert arrays == [pytest.approx(x, rel=1e-6) for x in sums]
        assert none == []


def test_158_the_same_number_in_all_replicas_counts_once_for_each(strategy):
    """It is each replica's own: that 5 is the same object everywhere says nothing."""
    n = strategy.num_replicas
    ctx = md.get_replica_context
    for result in in_each(strategy, lambda: ctx().all_reduce("sum", [5, 5.0, True])):
        assert result == [5 * n, 5.0 * n, n]
    for result in in_each(strategy, lambda: ctx().all_reduce("mean", [5, 5.0])):
        assert result == [5.0, 5.0]


def test_158_replicas_that_all_reduce_different_things_are_an_error(several):
    def structures():
        md.get_replica_context().all_reduce("sum", [1.0] * (replica_id() + 1))

    def ops():
        md.get_replica_context().all_reduce("mean" if replica_id() else "sum", 1.0)

    def shapes():
        md.get_replica_context().all_reduce("sum", md.constant([1.0] * (replica_id() + 1)))

    for fn, error, words in (
        (structures, StructureError, "structures"),
        (ops, MergeMismatchError, "replica 0 the sum .* replica 1 the mean"),
        (shapes, ValueError, "replica 1"),
        (lambda: md.get_replica_context().all_reduce("max", 1.0), ValueError, "max"),
    ):
        with pytest.raises(error, match=words):
            several.run(fn)
    with pytest.raises(ValueError, match="max"):
        md.get_replica_context().all_reduce("max", 1.0)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_159_the_gradient_of_all_reduce_is_all_reduce_of_the_gradients(strategy, op):
    """y = reduce of all x; loss of replica i = sum(i+1)·y0² + y1·x0: by hand, from all replicas."""
    n = strategy.num_replicas
    x0 = [np.array([1.0 + i, 2.0 - i]) for i in range(n)]
    x1 = [np.array([0.5 * i, 3.0]) for i in range(n)]
    scale = 1.0 if op == "sum" else 1 / n
    y0, y1 = sum(x0) * scale, sum(x1) * scale
    right0 = [sum(2 * (j + 1) * y0 for j in range(n)) * scale + y1 for i in range(n)]
    right1 = [sum(x0) * scale for i in range(n)]

    def fn():
        i = replica_id()
        a, b = md.constant(x0[i]), md.constant(x1[i])
        with md.GradientTape() as tape:
            tape.watch(a)
            tape.watch(b)
            reduced = md.get_replica_context().all_reduce(op, {"y": [a, b], "n": 3.0})
            first, second = reduced["y"]
            loss = md.ops.reduce_sum(first * first) * (i + 1.0) + md.ops.reduce_sum(second * a)
        return [g.numpy() for g in tape.gradient(loss, [a, b])]

    for i, (g0, g1) in enumerate(each(strategy, strategy.run(fn))):
        np.testing.assert_allclose(g0, right0[i], rtol=1e-12)
        np.testing.assert_allclose(g1, right1[i], rtol=1e-12)


def test_159_through_variables_and_twice(strategy):
    """z = mean(sum(w·c)): with respect to w it is the mean of n·c, summed over replicas' losses."""
    n = strategy.num_replicas
    with strategy.scope():
        w = md.Variable(np.array([1.0, -1.0]))

    def fn():
        ctx, c = md.get_replica_context(), replica_id() + 1.0
        with md.GradientTape(persistent=True) as tape:
            z = ctx.all_reduce("mean", ctx.all_reduce("sum", w * c))
        return tape.gradient(z, w).numpy(), tape.gradient(z, w).numpy()

    for i, gradients in enumerate(each(strategy, strategy.run(fn))):
        for gradient in gradients:
            np.testing.assert_allclose(gradient, [n * (i + 1.0)] * 2, rtol=1e-12)


def test_159_gradients_of_different_all_reduces_are_an_error(several):
    def fn():
        a, b = md.constant(1.0), md.constant(1.0)
        with md.GradientTape() as tape:
            tape.watch(a)
            tape.watch(b)
            ra, rb = md.get_replica_context().all_reduce("sum", [a, b])
        return tape.gradient(ra if replica_id() else rb, [a, b])

    with pytest.raises(MergeMismatchError, match="gradient of its leaf 1"):
        several.run(fn)


def test_159_of_the_default_replica_it_is_that_of_the_value_itself():
    x = md.constant(np.array([1.0, 2.0]))
    with md.GradientTape() as tape:
        tape.watch(x)
        y = md.get_replica_context().all_reduce("mean", {"x": x})["x"]
        loss = md.ops.reduce_sum(y * y)
    np.testing.assert_array_equal(tape.gradient(loss, x), [2.0, 4.0])
