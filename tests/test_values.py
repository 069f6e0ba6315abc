"""regroup and select_replica are inverse to each other, for any structure; what they cost."""

from __future__ import annotations

import dataclasses
import gc
import operator
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.errors import StructureError, UsageError
from minidist.structure import fill, leaves, node

Point = namedtuple("Point", ["x", "y"])


class Strict(Point):
    """A named tuple whose constructor must not run."""

    def __new__(cls, *fields):
        raise AssertionError("a new one was made with its constructor")


@dataclasses.dataclass(frozen=True)
class Record:
    a: Any
    b: Any


class Tree:
    def __init__(self, branches):
        self.branches = branches


optree.register_pytree_node(
    Tree,
    lambda tree: (tree.branches, "tree"),
    lambda _, new: Tree(tuple(new)),
    namespace="minidist",
)


class Leaf:
    """An object that nothing equals but itself."""


# A structure is made and taken apart here by a description, and not by minidist: a description is
# ("leaf", what) or (kind, [(key, description) …]).

KINDS = {
    "list": lambda keys, parts: parts,
    "tuple": lambda keys, parts: tuple(parts),
    "dict": lambda keys, parts: dict(zip(keys, parts, strict=True)),
    "ordered": lambda keys, parts: OrderedDict(zip(keys, parts, strict=True)),
    "default": lambda keys, parts: defaultdict(int, zip(keys, parts, strict=True)),
    "deque": lambda keys, parts: deque(parts),
    "tree": lambda keys, parts: Tree(tuple(parts)),
    "point": lambda keys, parts: Point(*parts),
    "strict": lambda keys, parts: tuple.__new__(Strict, parts),
    "record": lambda keys, parts: Record(*parts),
}
OF_TWO = ("point", "strict", "record")


def descriptions(leaf):
    def nodes(inner):
        free = st.lists(inner, max_size=3).flatmap(
            lambda parts: st.tuples(
                st.sampled_from([kind for kind in KINDS if kind not in OF_TWO]),
                st.permutations(["c", 1, "a"][: len(parts)]).map(
                    lambda keys: list(zip(keys, parts, strict=True))
                ),
            )
        )
        fixed = st.tuples(
            st.sampled_from(OF_TWO),
            st.tuples(inner, inner).map(lambda two: list(zip("ab", two, strict=True))),
        )
        return free | fixed

    return st.recursive(st.tuples(st.just("leaf"), leaf), nodes, max_leaves=8)


def make(description, leaf):
    kind, what = description
    if kind == "leaf":
        return leaf(what)
    return KINDS[kind]([key for key, _ in what], [make(part, leaf) for _, part in what])


def parts(kind, structure):
    if kind in ("dict", "ordered", "default"):
        return list(structure.values())
    if kind == "tree":
        return list(structure.branches)
    return [structure.a, structure.b] if kind == "record" else list(structure)


def check(description, structure, leaf):
    """Check a structure against its description, calling `leaf(what, object)` for its leaves."""
    kind, what = description
    if kind == "leaf":
        leaf(what, structure)
        return
    assert type(structure) is type(make((kind, what), lambda _: None))
    if isinstance(structure, dict):
        assert list(structure) == [key for key, _ in what]
    for (_, inner), part in zip(what, parts(kind, structure), strict=True):
        check(inner, part, leaf)


def in_order(description, structure):
    found = []
    check(description, structure, lambda _, leaf: found.append(leaf))
    return found


@given(descriptions(st.sampled_from(["shared", "own", "none", "own or none"])), st.integers(1, 5))
def test_select_undoes_regroup(description, n):
    shared = Leaf()
    pools = [[] for _ in range(n)]

    def leaf_of(i):
        def leaf(what):
            none = what == "none" or (what == "own or none" and i % 2 == 1)
            pools[i].append(None if none else shared if what == "shared" else Leaf())
            return pools[i][-1]

        return leaf

    each = [make(description, leaf_of(i)) for i in range(n)]
    grouped = md.regroup(each)

    def is_grouped(what, leaf):
        differs = n > 1 and what in ("own", "own or none")
        assert isinstance(leaf, md.PerReplica) == differs
        if what == "shared":
            assert leaf is shared

    check(description, grouped, is_grouped)
    for i in range(n):
        found = in_order(description, md.select_replica(i, grouped))
        assert list(map(id, found)) == list(map(id, pools[i]))


@given(descriptions(st.booleans()), st.integers(2, 5))
def test_mirrored_leaves_are_selected_by_device(description, n):
    shared, devices = Leaf(), md.devices(f"cpu*{n}")
    each = [make(description, lambda same: shared if same else Leaf()) for _ in range(n)]
    grouped = md.regroup(each, md.Mirrored, devices)
    for device, own in zip(devices, each, strict=True):
        found = leaves(md.select_device_mirrored(device, grouped))
        assert list(map(id, found)) == list(map(id, leaves(own)))


@given(descriptions(st.none()))
def test_fill_undoes_leaves(description):
    structure = make(description, lambda _: Leaf())
    assert fill(structure, leaves(structure)) is structure
    other = [Leaf() for _ in leaves(structure)]
    assert leaves(fill(structure, other)) == other
    assert in_order(description, fill(structure, other)) == other


@given(descriptions(st.none()), descriptions(st.none()), st.integers(1, 3))
def test_structures_line_up_or_are_an_error(a, b, place):
    def shape(description):
        kind, what = description
        keyed = kind in ("dict", "ordered", "default")
        return kind, (
            {key: shape(part) for key, part in what}
            if keyed
            else [shape(part) for _, part in what or ()]
        )

    each = [make(a, lambda _: Leaf()) for _ in range(4)]
    each[place] = make(b, lambda _: Leaf())
    if shape(a) == shape(b):
        md.regroup(each)
    else:
        with pytest.raises(StructureError, match=f"replicas 0 and {place} returned different"):
            md.regroup(each)


NUMBERS = st.integers(-9, 9)
OPERATORS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=2),
    st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=4),
)
def test_operators_are_the_components_own(pairs, operators):
    def program(a, b):
        for operation in operators:
            a = operation(a, b) + operation(3, a)
        return -a, abs(a), ~a

    a, b = (md.PerReplica(None, [pair[side] for pair in pairs]) for side in (0, 1))
    with md.Strategy("cpu*2") as strategy:
        got = strategy.run(lambda: program(a, b))
    assert [md.select_replica(i, got) for i in range(2)] == [program(*pair) for pair in pairs]


def test_arrays_are_leaves():
    arrays = [np.zeros(2), np.ones(2)]
    assert md.local_results(md.regroup(arrays))[1] is arrays[1]


def test_values_are_one_for_each_device():
    with pytest.raises(ValueError, match="3 values for 2 devices"):
        md.PerReplica(md.devices("cpu*2"), [1, 2, 3])


def test_a_class_made_in_every_step_is_not_kept():
    seen = []

    def step():
        class Local(dict):
            pass

        seen.append(weakref.ref(Local))
        return Local(a=1.5)

    node.cache_clear()
    for _ in range(node.cache_info().maxsize + 10):
        value = step()
        md.regroup([value, type(value)(a=2.5)])
    gc.collect()
    assert seen[0]() is None


def test_outside_all_strategies_a_per_replica_value_is_no_single_number():
    with md.Strategy("cpu*2") as strategy:
        losses = strategy.run(lambda: md.get_replica_context().replica_id + 0.5)
    for use in (float, bool, lambda x: x + 1, lambda x: x < 3, np.asarray, "{:.3f}".format):
        with pytest.raises((UsageError, TypeError), match=r"single value|unsupported"):
            use(losses)
    assert float(md.Mirrored(md.devices("cpu*2"), [1.5, 1.5])) == 1.5
    assert float(md.PerReplica(md.devices("cpu"), [2.5])) == 2.5
