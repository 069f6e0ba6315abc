"""Distributed values, regroup and select, by the numbers of docs/semantics.md (62 to 89)."""

from __future__ import annotations

import copy
import dataclasses
import gc
import operator
import pickle
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest

import minidist as md
from minidist.device import get as get_device
from minidist.errors import StructureError, UsageError
from minidist.structure import describe, fill, leaves, map_leaves

REPLICAS = pytest.mark.parametrize("n", [1, 2, 3])


class Leaf:
    """An object that nothing equals but itself."""


def new(n):
    return [Leaf() for _ in range(n)]


@pytest.fixture
def two():
    with md.Strategy("cpu*2") as strategy:
        yield strategy


def in_replicas(fn, n=2):
    """Return what `fn` gives in each of n replicas, where distributed values have one component."""
    with md.Strategy(f"cpu*{n}") as strategy:
        out = strategy.run(fn)
    return [md.select_replica(i, out) for i in range(n)]


# --- 62 to 66: components, devices and maps -----------------------------------------------------


@REPLICAS
@pytest.mark.parametrize("kind", [md.PerReplica, md.Mirrored])
def test_062_get_by_device(kind, n):
    value = kind(md.devices(f"cpu*{n}"), range(n))
    for i in range(n):
        assert value.get(f"cpu:{i}") == value.get(get_device(f"cpu:{i}")) == i
        assert value.devices[i].short == f"cpu:{i}"
    with pytest.raises(ValueError, match=r"no component on cpu:7, only on cpu:0"):
        value.get("cpu:7")
    with pytest.raises(ValueError, match="made without devices"):
        kind(None, range(n)).get("cpu:0")


@pytest.mark.parametrize("n", [2, 3])
def test_063_get_by_context(n):
    names = [f"cpu:{i}" for i in range(n)]
    per_replica, mirrored = md.PerReplica(names, range(n)), md.Mirrored(names, range(n))
    with md.Strategy(names) as strategy:
        here = strategy.run(lambda: (per_replica.get(), mirrored.get()))
        assert md.local_results(here[0]) == md.local_results(here[1]) == tuple(range(n))

        with strategy.scope():
            variable, seen = md.Variable(0.0), []
            strategy.update(variable, lambda _: seen.append((per_replica.get(), mirrored.get())))
            assert seen == [(i, i) for i in range(n)]

            assert mirrored.get() == 0
            with md.device("cpu:1"):
                assert mirrored.get() == 1
            with md.device("cpu:7"):
                assert mirrored.get() == 0
            with pytest.raises(UsageError, match="no single value in the cross-replica context"):
                per_replica.get()


def test_063_a_replica_beyond_the_components_is_an_error():
    with md.Strategy("cpu*3") as strategy:
        for value in (md.PerReplica(None, [1, 2]), md.Mirrored(["cpu:0", "cpu:1"], [1, 2])):
            with pytest.raises(UsageError, match="no component for replica 2"):
                strategy.run(lambda value=value: value.get())
            with pytest.raises(UsageError, match="no component for replica 2"):
                strategy.run(lambda x: x, value)


def test_064_names_are_canonical():
    full = "/job:worker/task:0/device:CPU:0"
    for name in ("", "cpu", "cpu:0", "/cpu:0", "/CPU:0", "/device:CPU:0", full):
        assert get_device(name) is get_device("cpu:0")
        assert md.Mirrored([name], [1]).get(full) == 1
    assert get_device("").name == full
    with pytest.raises(ValueError, match=r"is no device here; write .*/device:CPU:1"):
        get_device("/device:cpu:0")
    for name in ("/job:ps/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0", "/task:2/cpu:0"):
        with pytest.raises(ValueError, match="a device of another process"):
            get_device(name)


def test_065_one_device_by_two_names_is_an_error():
    for names in (["cpu:1", "/device:CPU:1"], ["cpu:0", "cpu:2", ""]):
        for make in (
            md.ReplicaDeviceMap,
            lambda names: md.WorkerDeviceMap(names, 2),
            lambda names: md.PerReplica(names, range(len(names))),
            md.Strategy,  # and with it the iterators over its data sets
        ):
            with pytest.raises(ValueError, match="twice"):
                make(names)
    with pytest.raises(ValueError, match="at least one device"):
        md.ReplicaDeviceMap([])


def test_066_device_maps():
    replicas = md.ReplicaDeviceMap(["cpu:3", "cpu:1", "cpu:2"])
    assert [replicas.of_replica(i) for i in range(3)] == [0, 1, 2]
    assert [replicas[i].short for i in range(3)] == ["cpu:3", "cpu:1", "cpu:2"]
    assert replicas.of_device("/device:CPU:2") == 2 and list(replicas) == list(replicas.devices)

    single = md.SingleDeviceMap("cpu:1")
    assert single.of_device("cpu:1") == 0 and len(single) == 1
    with pytest.raises(ValueError, match="no replica's"):
        single.of_replica(0)

    workers = md.WorkerDeviceMap(["cpu:0", "cpu:1"], 3)
    assert [workers.of_replica(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert workers.of_device("cpu:1") == 1
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match="2 workers of 3 replicas"):
            workers.of_replica(wrong)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="only for 3 replicas"):
            replicas.of_replica(wrong)
    with pytest.raises(ValueError, match="at least 1 replica"):
        md.WorkerDeviceMap(["cpu:0"], 0)


def test_066_a_value_is_indexed_through_its_map():
    shared = md.PerReplica(md.WorkerDeviceMap(["cpu:0", "cpu:1"], 2), ["a", "b"])
    assert in_replicas(shared.get, n=4) == ["a", "a", "b", "b"]
    assert [md.select_replica(i, [shared]) for i in range(4)] == [["a"], ["a"], ["b"], ["b"]]
    one = md.Mirrored(md.SingleDeviceMap("cpu:1"), ["only"])
    assert one.get("cpu:1") == md.select_device_mirrored(get_device("cpu:1"), one) == "only"
    with pytest.raises(ValueError, match="no replica's"):
        md.select_replica(0, one)
    with pytest.raises(UsageError, match="1 values for 2 devices"):
        md.Mirrored(md.ReplicaDeviceMap(["cpu:0", "cpu:1"]), ["only"])


# --- 67 to 69: like a tensor --------------------------------------------------------------------


def test_067_is_tensor_like_if_all_components_are():
    tensor, variable = md.constant([1.0]), md.Variable(0.0)
    assert md.PerReplica(None, [tensor, variable]).is_tensor_like
    assert md.is_tensor_like(md.Mirrored(None, [tensor, np.zeros(2)]))
    assert not md.PerReplica(None, [tensor, 1.0]).is_tensor_like
    assert not md.PerReplica(None, ["a", "b"]).is_tensor_like
    assert md.is_tensor_like(tensor) and not md.is_tensor_like(1.0)


@pytest.mark.parametrize("kind", [md.PerReplica, md.Mirrored])
def test_068_attributes_are_the_components(two, kind):
    class Component:
        def __init__(self, x):
            self.x = x

        _private = "not forwarded"

    value = kind(two.devices, [Component(7), Component(8)])
    assert md.local_results(two.run(lambda: value.x)) == (7, 8)
    for missing in ("y", "_private", "__nothing__"):
        with pytest.raises(AttributeError, match=missing):
            two.run(lambda missing=missing: getattr(value, missing))
    tensors = kind(two.devices, [md.constant([[1.0]]), md.constant([[1.0, 2.0]])])
    assert in_replicas(lambda: tensors.shape) == [(1, 1), (1, 2)]


def test_068_without_a_component_there_are_no_attributes(two):
    value = md.PerReplica(two.devices, [md.constant(1.0), md.constant(2.0)])
    with two.scope():
        assert not hasattr(value, "shape") and getattr(value, "shape", None) is None
        with pytest.raises(AttributeError, match=r"'shape'.*cross-replica.*strategy\.run"):
            _ = value.shape


BINARY = [
    (operator.add, 7, 3),
    (operator.sub, 7, 3),
    (operator.mul, 7, 3),
    (operator.truediv, 7, 3),
    (operator.floordiv, 7, 3),
    (operator.mod, 7, 3),
    (operator.pow, 7, 3),
    (operator.lt, 7, 3),
    (operator.le, 7, 7),
    (operator.gt, 7, 3),
    (operator.ge, 3, 7),
    (operator.and_, 6, 3),
    (operator.or_, 6, 3),
    (operator.xor, 6, 3),
    (operator.lshift, 6, 3),
    (operator.rshift, 60, 3),
    (operator.matmul, np.arange(4.0).reshape(2, 2), np.ones((2, 2))),
]


@pytest.mark.parametrize(("operation", "a", "b"), BINARY, ids=lambda x: getattr(x, "__name__", ""))
def test_069_binary_operators_and_their_reflections(two, operation, a, b):
    left = md.PerReplica(two.devices, [a, a * 10])
    right = md.Mirrored(two.devices, [b, b])
    got = two.run(lambda: [operation(left, b), operation(a, right), operation(left, right)])
    for i, mine in enumerate((a, a * 10)):
        expected = [operation(mine, b), operation(a, b), operation(mine, b)]
        assert np.array_equal(md.select_replica(i, got), expected)
    # An array on the left does not take the value for an array of objects.
    got = two.run(lambda: operation(np.array(a), right))
    assert np.array_equal(md.select_replica(1, got), operation(np.array(a), b))


@pytest.mark.parametrize("operation", [operator.neg, operator.pos, operator.invert, operator.abs])
def test_069_unary_operators(two, operation):
    value = md.PerReplica(two.devices, [-7, 8])
    assert md.local_results(two.run(lambda: operation(value))) == (operation(-7), operation(8))


def test_069_power_with_three_arguments_and_indexing(two):
    value = md.PerReplica(two.devices, [7, 8])
    assert in_replicas(lambda: pow(value, 3, 10)) == [3, 2]
    lists = md.PerReplica(two.devices, [[1, 2, 3], []])
    assert in_replicas(lambda: str(lists[:1])) == ["[1]", "[]"]
    stops = md.PerReplica(two.devices, [slice(2), slice(0)])
    assert in_replicas(lambda: str(lists[stops])) == ["[1, 2]", "[]"]
    assert in_replicas(lambda: (len(lists), sum(lists), bool(lists))) == [
        (3, 6, True),
        (0, 0, False),
    ]
    with pytest.raises(TypeError, match="not subscriptable"):
        two.run(lambda: value[0])
    with pytest.raises(TypeError, match="unsupported operand"):
        two.run(lambda: value + "a")


def test_069_conversions(two):
    value = md.PerReplica(two.devices, [0, 3])
    got = in_replicas(lambda: (int(value), float(value), bool(value), operator.index(value)))
    assert got == [(0, 0.0, False, 0), (3, 3.0, True, 3)]
    arrays = md.PerReplica(two.devices, [md.constant([1.0, 2.0]), md.constant([3.0])])
    got = in_replicas(lambda: np.asarray(arrays))
    assert [array.tolist() for array in got] == [[1.0, 2.0], [3.0]]
    got = in_replicas(lambda: md.constant(arrays))
    assert [tensor.numpy().tolist() for tensor in got] == [[1.0, 2.0], [3.0]]
    with two.scope(), pytest.raises(UsageError, match="no single value"):
        bool(value)


def test_069_operations_and_tapes_see_the_component(two):
    factors = md.PerReplica(two.devices, [2, 5])

    def gradient():
        own = md.constant([1.0, 2.0])
        everyones = md.PerReplica(two.devices, [own, own])
        with md.GradientTape() as tape:
            tape.watch(own)
            loss = md.ops.reduce_sum(everyones * everyones + own * factors + factors * everyones)
            loss = loss + md.ops.reduce_sum(own + everyones)
        return Whole(tape.gradient(loss, own).numpy().tolist())

    got = in_replicas(gradient)
    assert [each.a for each in got] == [[8.0, 10.0], [14.0, 16.0]]


def test_069_equality_and_hash_go_by_identity(two):
    a, b = (md.PerReplica(two.devices, [1, 2]) for _ in range(2))
    assert a == a and a != b and len({a, b}) == 2 and [b, a].index(a) == 1
    assert md.regroup([a, a]) is a and isinstance(md.regroup([a, b]), md.PerReplica)


# --- 70 to 74: copies and helpers ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [md.PerReplica, md.Mirrored])
@pytest.mark.parametrize("devices", [None, "cpu*2"])
def test_070_copy_and_deepcopy(kind, devices):
    devices = devices and md.devices(devices)
    value = kind(devices, [md.constant([1.0]), [2.0]])
    shallow, deep = copy.copy(value), copy.deepcopy(value)
    assert type(shallow) is type(deep) is kind and value not in (shallow, deep)
    assert shallow.devices == deep.devices == value.devices
    assert all(a is b for a, b in zip(shallow.values, value.values, strict=True))
    assert deep.values[0] is not value.values[0] and deep.values[0].numpy().tolist() == [1.0]
    assert deep.values[0].device is value.values[0].device
    assert deep.values[1] == [2.0] and deep.values[1] is not value.values[1]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(value, protocol)


def test_071_a_dict_that_holds_a_variable_gives_its_value(two):
    with two.scope():
        variable = md.Variable(3.0)
    out = two.run(lambda: {"v": variable})
    assert out["v"] is variable and map_leaves(float, out) == {"v": 3.0}


@REPLICAS
def test_072_local_results(n):
    assert md.local_results(md.PerReplica(None, range(n))) == tuple(range(n))
    for value in (None, "plain", [1, 2], {"a": 1}):
        assert md.local_results(value) == (value,)


def test_073_group_takes_any_value(two):
    for value in (None, md.constant(1.0), md.PerReplica(two.devices, [md.constant(1.0), None])):
        assert two.group(value) is None
    assert two.group([two.run(lambda: md.constant(1.0)), {"a": 2}]) is None


def test_074_value_container(two):
    with two.scope():
        variable = md.Variable(0.0)
    assert [md.value_container(part) for part in variable.copies] == [variable, variable]
    assert md.value_container(variable) is variable
    for other in (None, 1.0, md.constant(1.0), md.PerReplica(None, [1])):
        assert md.value_container(other) is other

    part = variable.copies[0]
    del variable
    gc.collect()
    assert md.value_container(part) is part
    assert md.regroup([part, part]) is part


def test_074_value_container_of_an_aggregating_variable():
    with md.Strategy("cpu*2", variable_update="parameter_server") as strategy, strategy.scope():
        variable = md.Variable(0.0, aggregation=md.VariableAggregation.SUM)
        assert md.value_container(variable.copies[0]) is variable
        assert strategy.run(variable.get) is variable


def test_074_a_foreign_object_that_has_a_container_is_none_of_ours():
    class Cargo:
        container = "a steel box"

    a, b = Cargo(), Cargo()
    assert md.value_container(a) is a and md.regroup([a, b]).values == (a, b)


# --- 75 to 77: structures -----------------------------------------------------------------------


@REPLICAS
def test_075_nested_structures_are_walked_and_select_undoes_it(n):
    each = [(Leaf(), [Leaf(), {"a": Leaf(), "b": (Leaf(), [])}], {}) for _ in range(n)]
    grouped = md.regroup(each)
    if n > 1:
        assert isinstance(grouped[1][1]["b"][0], md.PerReplica)
        assert grouped[0].values == tuple(own[0] for own in each)
    for i, own in enumerate(each):
        assert md.select_replica(i, grouped) == own


def test_075_what_is_not_distributed_is_passed_on_as_the_same_object():
    shared = {"a": [1, (2, 3)], "b": deque([4])}
    assert md.select_replica(1, shared) is shared
    half = [shared, md.PerReplica(None, [1, 2])]
    assert md.select_replica(1, half)[0] is shared and md.select_replica(1, half)[1] == 2


def test_076_select_by_device_refuses_per_replica_values(two):
    grouped = md.regroup([{"a": Leaf()}, {"a": Leaf()}], devices=two.devices)
    with pytest.raises(TypeError, match="PerReplica value has no one component for cpu:1"):
        md.select_device_mirrored(two.devices[1], grouped)


def test_077_wrap_says_what_leaves_become(two):
    each = [(Leaf(), [Leaf(), 1]) for _ in range(2)]
    grouped = md.regroup(each, md.Mirrored, two.devices)
    assert isinstance(grouped[0], md.Mirrored) and isinstance(grouped[1][0], md.Mirrored)
    for device, own in zip(two.devices, each, strict=True):
        assert md.select_device_mirrored(device, grouped) == own
    assert md.regroup([[1.5], [2.5]], lambda devices, row: sum(row)) == [4.0]


# --- 78, 79, 89: the copies of a variable -------------------------------------------------------


def test_078_matching_copies_regroup_to_the_variable(two):
    with two.scope():
        variable = md.Variable(0.0)
    assert md.regroup(list(variable.copies)) is variable
    assert md.regroup(list(variable.copies), md.Mirrored, two.devices) is variable
    out = two.run(lambda: {"v": variable.get(), "w": [variable.get()]})
    assert out["v"] is variable and out["w"][0] is variable


def test_079_copies_must_be_their_replicas(two):
    with two.scope():
        variable = md.Variable(0.0)
    first, second = variable.copies
    for wrong in ([second, first], [first, first]):
        with pytest.raises(ValueError, match="another replica's"):
            md.regroup(wrong)
        with pytest.raises(ValueError, match="another replica's"):
            md.regroup([(part, 1) for part in wrong], devices=two.devices)
    for mixed in ([first, md.constant(1.0)], [1.5, second]):
        with pytest.raises(ValueError, match="copy of a variable"):
            md.regroup(mixed)


def test_089_copies_of_different_variables_are_an_error(two):
    with two.scope():
        v, w = md.Variable(0.0, name="v"), md.Variable(0.0, name="w")
    with pytest.raises(ValueError, match=r"replicas 0 and 1 .*copies of different variables"):
        md.regroup([v.copies[0], w.copies[1]])
    grouped = md.regroup([v, w])
    assert isinstance(grouped, md.PerReplica) and grouped.values == (v, w)


# --- 80 to 88: what is shared, and what kinds there are -----------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_080_081_identity_says_what_is_shared(n):
    shared = Leaf()
    assert md.regroup([shared] * n) is shared
    out = md.regroup([(shared, Leaf()) for _ in range(n)])
    assert out[0] is shared and (n == 1) == isinstance(out[1], Leaf)
    equal = [float("1.5") for _ in range(n + 1)]
    assert md.regroup(equal).values == tuple(equal)
    assert md.regroup([*[shared] * n, Leaf()]).values[:n] == (shared,) * n


def test_082_one_device_changes_nothing_but_copies():
    each = {"a": [Leaf()], "b": (Leaf(), None)}
    assert md.regroup([each]) is each and md.select_replica(0, each) is each
    with md.Strategy("cpu") as strategy:
        with strategy.scope():
            variable = md.Variable(0.0)
        assert strategy.run(variable.get) is variable
        out = strategy.run(lambda: {"v": (variable.get(), each)})
        assert out["v"][0] is variable and out["v"][1] is each


class Spec(namedtuple("Spec", ["mode", "loss", "train_op"])):
    """A named tuple whose own constructor must not see per-replica values."""

    def __new__(cls, mode, loss, train_op=None):
        assert isinstance(loss, Leaf | float), "loss must be a number"
        return super().__new__(cls, mode=mode, loss=loss, train_op=train_op or loss)


class Pair(NamedTuple):
    a: Any
    b: Any = 1


def test_083_named_tuples_keep_their_type_without_their_constructor():
    with md.Strategy("cpu*2") as strategy:
        out = strategy.run(lambda: Spec("train", Leaf(), Leaf()))
    assert type(out) is Spec and out.mode == "train"
    assert isinstance(out.loss, md.PerReplica) and isinstance(out.train_op, md.PerReplica)
    own = md.select_replica(1, out)
    assert type(own) is Spec and own.loss is out.loss.values[1]
    assert type(md.regroup([Pair(1.5), Pair(2.5)])) is Pair


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([1.5], (1.5,), "list of length 1 and tuple of length 1"),
        ([1.5], [1.5, 2.5], "list of length 1 and list of length 2"),
        ([], [1.5], "list of length 0 and list of length 1"),
        ({"a": 1}, {"b": 1}, "dict with 'a' and dict with 'b'"),
        ({"a": 1}, {}, "dict with 'a' and dict with nothing in it"),
        (Pair(1, 2), (1, 2), "Pair with 'a', 'b' and tuple of length 2"),
        ({"a": 1}, OrderedDict(a=1), "dict with 'a' and OrderedDict with 'a'"),
        ([1.5], 1.5, "list of length 1 and a leaf of type float"),
        (1.5, [1.5], "a leaf of type float and list of length 1"),
    ],
)
def test_084_structures_that_differ_are_an_error(a, b, words):
    with pytest.raises(StructureError, match="replicas 0 and 1 returned different.*: " + words):
        md.regroup([a, b])
    with pytest.raises(ValueError, match=r"replicas 0 and 2 .* at \['x'\]\[1\]: " + words):
        md.regroup([{"x": [0.0, a]}, {"x": [0.0, copy.copy(a)]}, {"x": [0.0, b]}])


class Named(dict):
    """A dict with something of its own and a constructor that wants it."""

    def __init__(self, name, **items):
        super().__init__(items)
        self.name = name


class Frozen(Mapping):
    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: {"b": b, "a": a},
        lambda a, b: OrderedDict(b=b, a=a),
        lambda a, b: defaultdict(list, b=b, a=a),
        lambda a, b: UserDict(b=b, a=a),
        lambda a, b: Named("me", b=b, a=a),
        lambda a, b: Frozen({"b": b, "a": a}),
        lambda a, b: MappingProxyType({"b": b, "a": a}),
    ],
)
def test_085_mappings_keep_their_type_and_order(make):
    each = [make(Leaf(), [(Leaf(), 1)]) for _ in range(2)]
    grouped = md.regroup(each)
    assert type(grouped) is type(each[0]) and list(grouped) == ["b", "a"]
    assert grouped["a"].values == (each[0]["a"], each[1]["a"])
    assert isinstance(grouped["b"][0][0], md.PerReplica) and grouped["b"][0][1] == 1
    assert isinstance(each[0]["a"], Leaf)  # the replicas' own are not changed
    for i, own in enumerate(each):
        selected = md.select_replica(i, grouped)
        assert type(selected) is type(own) and dict(selected) == dict(own)
    assert getattr(grouped, "name", "me") == "me"
    if isinstance(grouped, defaultdict):
        assert grouped["new"] == []


def test_085_keys_in_another_order_are_the_same_keys():
    grouped = md.regroup([{"a": 1.5, "b": 2.5}, {"b": 3.5, "a": 4.5}])
    assert list(grouped) == ["a", "b"] and grouped["a"].values == (1.5, 4.5)


def test_085_wrapped_named_tuples_and_lists_of_tuples():
    each = [{"pairs": [Pair(Leaf(), (1, Leaf())), (Leaf(), Leaf())]} for _ in range(3)]
    grouped = md.regroup(each)
    assert type(grouped["pairs"][0]) is Pair and type(grouped["pairs"][1]) is tuple
    assert grouped["pairs"][0].b[0] == 1
    assert [md.select_replica(i, grouped) for i in range(3)] == each


def test_086_a_variable_that_all_replicas_return_is_the_variable(two):
    with two.scope():
        variable = md.Variable(0.0)
        on_read = md.Variable(0.0, synchronization=md.VariableSynchronization.ON_READ)
    assert two.run(lambda: variable) is variable
    assert two.run(lambda: (variable, [on_read]))[1][0] is on_read


@REPLICAS
def test_087_none_everywhere_stays_none(n):
    assert md.regroup([None] * n) is None
    assert md.regroup([[None, (None,)]] * n) == [None, (None,)]


@pytest.mark.parametrize("value", [1.5, [1.5], {"a": (1.5,)}])
def test_088_none_and_a_value_are_components(two, value):
    assert md.regroup([None, value]).values == (None, value)
    assert md.regroup([[value], [None]])[0].values == (value, None)
    out = two.run(lambda: value if md.get_replica_context().replica_id == 0 else None)
    assert out.values == (value, None)
    assert md.select_replica(0, out) is value and md.select_replica(1, out) is None


# --- dataclasses and registered pytrees ---------------------------------------------------------


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = dataclasses.field(default=2, kw_only=True)
    late: Any = dataclasses.field(init=False)

    def __post_init__(self):
        if not isinstance(self.a, Leaf):
            raise TypeError("a must be a Leaf")


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    a: Any
    b: Any = 2


@md.leaf
@dataclasses.dataclass
class Whole:
    a: Any


class Whole2(Whole):
    pass


@dataclasses.dataclass
class Oops(Exception):
    a: Any


@pytest.mark.parametrize("cls", [Plain, Sealed])
def test_dataclasses_are_walked_without_their_constructor(two, cls):
    each = [cls(Leaf(), b=[Leaf(), 1]) for _ in range(2)]
    grouped = md.regroup(each)
    assert type(grouped) is cls and grouped.a.values == (each[0].a, each[1].a)
    assert grouped.b[1] == 1 and not hasattr(grouped, "late")
    for i, own in enumerate(each):
        selected = md.select_replica(i, grouped)
        assert type(selected) is cls and (selected.a, selected.b) == (own.a, own.b)
    assert two.run(lambda x: x.a is grouped.a, each[0]).values == (False, False)
    assert md.select_replica(0, each[0]) is each[0]  # nothing distributed: the same object


def test_a_dataclass_keeps_attributes_that_are_no_fields(two):
    job = Plain(Leaf(), b=md.PerReplica(two.devices, [5, 6]))
    job.name = "mine"
    assert in_replicas(lambda: md.select_replica(1, job).name) == ["mine", "mine"]
    assert md.local_results(two.run(lambda x: (x.b, x.name), job)[0]) == (5, 6)


def test_dataclasses_that_lack_a_field_differ():
    full = Plain(Leaf())
    full.late = 1
    with pytest.raises(StructureError, match="Plain with 'a', 'b' and Plain with 'a', 'b', 'late'"):
        md.regroup([Plain(Leaf()), full])


@pytest.mark.parametrize("cls", [Whole, Whole2, Oops])
def test_dataclasses_that_are_leaves_are_not_walked(cls):
    each = [cls(Leaf()), cls(Leaf())]
    assert md.regroup(each).values == tuple(each)
    assert md.local_results(md.regroup(each)) == tuple(each)


class Tree:
    def __init__(self, *branches, label=None):
        self.branches, self.label = branches, label


optree.register_pytree_node(
    Tree,
    lambda tree: (tree.branches, tree.label),
    lambda label, branches: Tree(*branches, label=label),
    namespace="minidist",
)


def test_registered_pytrees_are_walked():
    each = [Tree(Leaf(), [Leaf()], label="oak") for _ in range(2)]
    grouped = md.regroup(each)
    assert type(grouped) is Tree and grouped.label == "oak"
    assert grouped.branches[1][0].values == (each[0].branches[1][0], each[1].branches[1][0])
    assert md.select_replica(1, grouped).branches == each[1].branches
    with pytest.raises(StructureError, match="Tree with 0, 1 and 'oak' and Tree with 0 and 'oak'"):
        md.regroup([each[0], Tree(Leaf(), label="oak")])
    with pytest.raises(StructureError, match="'oak' and Tree with 0, 1 and 'elm'"):
        md.regroup([each[0], Tree(Leaf(), [Leaf()], label="elm")])


def test_other_collections():
    queues = [deque([Leaf(), 1], maxlen=5) for _ in range(2)]
    grouped = md.regroup(queues)
    assert type(grouped) is deque and grouped.maxlen == 5 and grouped[1] == 1
    assert isinstance(grouped[0], md.PerReplica)

    class Mine(list):
        pass

    for kind in (Mine, set, frozenset):  # leaves, as in optree
        each = [kind(new(2)), kind(new(2))]
        assert md.regroup(each).values == tuple(each)


def test_leaves_and_fill():
    structure = {"b": [1, (2,)], "a": Pair(3, None)}
    assert leaves(structure) == [1, 2, 3, None]
    assert fill(structure, "wxyz") == {"b": ["w", ("x",)], "a": Pair("y", "z")}
    assert fill(structure, leaves(structure)) is structure
    assert describe(structure) == "dict with 'b', 'a'"
