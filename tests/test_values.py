"""PerReplica, Mirrored, regroup and select: identity says what is shared."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.errors import StructureError, UsageError

Point = namedtuple("Point", ["x", "y"])


class Leaf:
    """An object that nothing equals but itself."""


def structures(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        ),
        max_leaves=8,
    )


def fill(shape, make):
    """Return a structure like `shape` with new leaves."""
    if isinstance(shape, Point):
        return Point(*[fill(item, make) for item in shape])
    if isinstance(shape, list | tuple):
        return type(shape)(fill(item, make) for item in shape)
    if isinstance(shape, dict):
        return {key: fill(item, make) for key, item in shape.items()}
    return make(shape)


def leaves(structure):
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in leaves(structure[key])]
    if isinstance(structure, list | tuple):
        return [leaf for item in structure for leaf in leaves(item)]
    return [structure]


@given(structures(st.booleans()), st.integers(1, 5))
def test_select_undoes_regroup(shape, n):
    shared = Leaf()
    per_replica = [fill(shape, lambda same: shared if same else Leaf()) for _ in range(n)]
    grouped = md.regroup(per_replica)
    for i, own in enumerate(per_replica):
        selected = md.select_replica(i, grouped)
        assert [id(a) for a in leaves(selected)] == [id(b) for b in leaves(own)]
        assert fill(selected, lambda _: 0) == fill(own, lambda _: 0)
    if n > 1:
        kinds = [isinstance(leaf, md.PerReplica) for leaf in leaves(grouped)]
        assert kinds == [leaf is not shared for leaf in leaves(per_replica[0])]


def test_identity_and_not_equality_says_what_is_shared():
    one, other = float("1.5"), float("1.5")
    assert md.regroup([one, one]) is one
    assert md.regroup([one, other]).values == (1.5, 1.5)
    assert md.regroup([None, None]) is None
    assert md.regroup([None, one]).values == (None, 1.5)


@pytest.mark.parametrize(
    ("a", "b"),
    [([1.5], (1.5,)), ([1.5], [1.5, 2.5]), ({"a": 1.5}, {"b": 1.5}), (Point(1, 2), (1, 2))],
)
def test_structures_that_differ_are_an_error(a, b):
    with pytest.raises(StructureError, match="replicas 0 and 1"):
        md.regroup([a, b])


def test_kinds_of_containers_are_kept():
    out = md.regroup([OrderedDict(b=Leaf(), a=Point(Leaf(), 1)) for _ in range(2)])
    assert type(out) is OrderedDict and list(out) == ["b", "a"] and type(out["a"]) is Point
    assert out["a"].y == 1 and isinstance(out["a"].x, md.PerReplica)


def test_mirrored_leaves_can_be_selected_by_device_and_per_replica_ones_cannot():
    devices = md.devices("cpu*2")
    mirrored = md.regroup([{"w": Leaf()}, {"w": Leaf()}], wrap=md.Mirrored, devices=devices)
    assert md.select_device_mirrored(devices[1], mirrored)["w"] is mirrored["w"].values[1]
    with pytest.raises(TypeError, match="PerReplica"):
        md.select_device_mirrored(devices[1], md.PerReplica(devices, [1, 2]))


def test_get_by_device_and_by_context():
    devices = md.devices("cpu*2")
    per_replica, mirrored = md.PerReplica(devices, [1, 2]), md.Mirrored(devices, [3, 4])
    assert per_replica.get("cpu:1") == 2 and mirrored.get(devices[0]) == 3
    with pytest.raises(ValueError, match="no component on cpu:5"):
        mirrored.get("cpu:5")
    with md.Strategy(devices) as strategy:
        assert strategy.run(lambda: per_replica.get() + mirrored.get()).values == (4, 6)
        with strategy.scope():
            assert mirrored.get() == 3
            with md.device("cpu:1"):
                assert mirrored.get() == 4
            with pytest.raises(UsageError, match="cross-replica"):
                per_replica.get()


def test_values_are_one_for_each_device():
    with pytest.raises(UsageError, match="3 values for 2 devices"):
        md.PerReplica(md.devices("cpu*2"), [1, 2, 3])


def test_arrays_are_leaves():
    arrays = [np.zeros(2), np.ones(2)]
    assert md.local_results(md.regroup(arrays))[1] is arrays[1]
    assert md.local_results("plain") == ("plain",)
