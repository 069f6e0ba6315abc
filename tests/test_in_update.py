"""Sums in updates: the bits of sums that are taken first, whatever replicas bring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist import ops
from minidist.optim import LossScale
from minidist.optim.parts import cut

SHAPES = [(300, 11), (), (5,), (3, 0), (7,)]
OPTIMIZERS = {
    "sgd": lambda **options: md.optim.SGD(0.1, **options),
    "nesterov": lambda **options: md.optim.Momentum(0.1, nesterov=True, **options),
    "rmsprop": lambda **options: md.optim.RMSProp(0.1, **options),
    "adam": lambda **options: md.optim.Adam(0.1, **options),
}
OPTIONS = {
    "plain": dict,
    "decay": lambda: {"weight_decay": 0.1},
    "clip": lambda: {"gradient_clip": 1e-3, "loss_scale": 8.0},
    "clip_norm": lambda: {"gradient_clip_norm": 0.5},
    "automatic": lambda: {"loss_scale": LossScale(8.0, automatic=True, every_n=1)},
    "accumulated": lambda: {"gradient_accumulation_steps": 2},
}
COUNTS = {
    "none": None,
    "equal": (4, 4, 4, 4, 4),
    "unequal": (3, 1, 5, 2, 7),
    "one": (0, 3, 0, 0, 0),
    "some": (2, 0, 5, 0, 1),
}


def train(optimizer, counts, replicas, *, policy=None, steps=4, apply=False):
    """Return all weights after some steps, of each replica."""
    options = {"overlap": False, **(policy or {})}
    data = np.random.default_rng(3)
    noise = [data.standard_normal((replicas, *shape)).astype("f4") for shape in SHAPES]
    with md.Strategy(f"cpu*{replicas}", **options) as strategy:
        with strategy.scope():
            dense = [
                md.Variable(np.full(shape, 0.5, "f8" if i == 2 else "f4"), name=f"v{i}")
                for i, shape in enumerate(SHAPES)
            ]
            table = md.Variable(np.ones((6, 3), "f4"), name="table")
        variables = [*dense, table]

        def step(number):
            me = md.get_replica_context().replica_id

            def loss():
                total = ops.reduce_sum(ops.embedding(table, md.constant([me, number % 6, me])))
                for i, variable in enumerate(dense):
                    if i == 4 and me != replicas - 1:  # only the last replica uses it
                        continue
                    x = ops.cast(variable, "float32") * md.constant(noise[i][me] + number)
                    total = total + ops.reduce_sum(ops.square(x))
                return total

            count = None if counts is None else counts[me]
            if not apply:
                optimizer.minimize(loss, variables, count)
                return
            with md.GradientTape() as tape:
                value = optimizer.scaled(loss())
            gradients = tape.gradient(value, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True), count)

        for number in range(steps):
            strategy.run(step, number)
        return [copy.array.copy() for variable in variables for copy in variable.copies]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("replicas", [2, 5])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_are_those_of_sums_that_are_taken_first(options, counts, replicas):
    names = list(OPTIMIZERS)
    make = OPTIMIZERS[names[(list(OPTIONS).index(options) + list(COUNTS).index(counts)) % 4]]
    own = COUNTS[counts]
    if own is not None and not any(own[:replicas]):
        own = (3, 0, 0)
    fused, first, applied = (
        train(make(**OPTIONS[options]()), own, replicas, policy=policy, apply=apply)
        for policy, apply in (({}, False), ({"all_reduce_spec": "copy"}, False), ({}, True))
    )
    assert_same(fused, first)
    assert_same(fused, applied)
    assert not np.array_equal(fused[0], np.full(SHAPES[0], 0.5, "f4"))


@pytest.mark.parametrize("policy", [{}, {"all_reduce_spec": "copy"}])
def test_gradients_that_others_have_are_only_read(policy):
    """A gradient may be a variable's own value, or an array that the program keeps."""
    with md.Strategy("cpu*2", overlap=False, **policy) as strategy:
        with strategy.scope():
            w = md.Variable(np.full(40000, 8.0, "f4"), name="w")
            v = md.Variable(np.full(40000, 2.0, "f4"), name="v")
        optimizer = md.optim.SGD(0.5)

        def step():
            kept = md.constant(np.full(40000, 4.0, "f4"))
            optimizer.apply_gradients([(w.read(), v), (v.read(), w)])
            optimizer.apply_gradients([(kept, v), (kept, w)])
            return kept

        for kept in md.local_results(strategy.run(step)):
            assert (kept.numpy() == 4).all()
        for copy in w.copies:
            assert (copy.array == 8 - 1 - 2).all()
        for copy in v.copies:
            assert (copy.array == 2 - 4 - 2).all()


def test_each_of_four_replicas_reads_and_writes_its_quarter():
    with md.Strategy("cpu*4", overlap=False) as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(64, "f4"), name="w")
        optimizer = md.optim.SGD(0.5)
        with md.Bytes(strategy) as moved:
            strategy.run(lambda: optimizer.minimize(lambda: ops.reduce_sum(w), [w]))
        links = {f"cpu:{a}->cpu:{b}" for a in range(4) for b in range(4) if a != b}
        assert moved.measured == dict.fromkeys(links, 64 + 64), (
            "gradients there, weights from there"
        )
        assert all((copy.array == 0.5).all() for copy in w.copies)


def test_what_is_kept_beside_the_copies_is_one_memory_and_changed_once():
    with md.Strategy("cpu*2", overlap=False) as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(64, "f4"), name="w")
        optimizer = md.optim.Momentum(0.5)
        for _ in range(2):
            strategy.run(lambda: optimizer.minimize(lambda: ops.reduce_sum(w), [w]))
        slot = optimizer.slot(w, "momentum")
        first, second = slot.copies
        assert np.shares_memory(first.array, second.array)
        assert (first.array == np.float32(1.9)).all()
        with strategy.scope():
            slot.assign_add(np.ones(64, "f4"))
        assert (second.array == np.float32(1.9) + 1).all()
        with pytest.raises(md.errors.UsageError, match="keeps in one place for all replicas"):
            strategy.update(slot, lambda slot: slot.assign_add(np.ones(64, "f4")))


ONE = np.ones(64, "f4")


def momentum(w, m, gradient):
    m.assign(ops.add(ops.multiply(m, np.float32(0.5)), gradient))
    w.assign_sub(m)


@pytest.mark.parametrize(
    "write",
    [
        lambda strategy, w, slot: strategy.update(w, lambda w, m: m.assign_add(ONE), slot),
        lambda strategy, w, slot: strategy.update(w, momentum, slot, ONE),
        lambda strategy, w, slot: strategy.update_non_slot([w], lambda: slot.assign_sub(ONE)),
        lambda strategy, w, slot: strategy.run(
            lambda: md.get_replica_context().merge_call(
                lambda strategy: strategy.update(w, lambda w: slot.assign(ONE))
            )
        ),
    ],
    ids=["argument", "momentum", "update_non_slot", "in a meeting"],
)
def test_no_update_writes_what_is_kept_in_one_place_and_all_may_read_it(write):
    with md.Strategy("cpu*3", overlap=False) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(64, "f4"), name="w")
        optimizer = md.optim.Momentum(1.0)
        strategy.run(lambda: optimizer.minimize(lambda: ops.reduce_sum(w), [w]))
        slot = optimizer.slot(w, "momentum")
        with pytest.raises(md.errors.UsageError, match="an update assigns 'w/Momentum'"):
            write(strategy, w, slot)
        assert (slot.copies[0].array == 1).all()
        strategy.update(w, lambda w, m: w.assign_sub(m), slot)
        strategy.update(slot, lambda m: w.assign_sub(m))
        assert all((copy.array == -3).all() for copy in w.copies)


@given(
    arrays=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([4, 8])), max_size=6),
    parts=st.integers(1, 7),
)
def test_parts_have_each_element_once_and_share_no_line_of_memory(arrays, parts):
    cut_ = cut(arrays, parts)
    assert len(cut_) == parts
    owners = [[[] for _ in range(size)] for size, _ in arrays]
    for part, pieces in enumerate(cut_):
        for array, first, end in pieces:
            assert first < end and first * arrays[array][1] % 64 == 0
            for element in range(first, end):
                owners[array][element].append(part)
    for row in owners:
        assert all(len(owner) == 1 for owner in row)
        assert row == sorted(row), "parts follow each other"
    lines = [
        sum(-(-(p.end - p.first) * arrays[p.array][1] // 64) for p in pieces) for pieces in cut_
    ]
    assert max(lines) - min(lines) <= 1


@pytest.mark.parametrize("idle", range(4))
def test_accumulated_gradients_without_an_example_are_only_read(idle):
    """They are the arrays that the program brought last."""
    with md.Strategy("cpu*4", overlap=False) as strategy:
        with strategy.scope():
            w = md.Variable(np.full(40000, 8.0, "f4"), name="w")
        optimizer = md.optim.SGD(0.5, gradient_accumulation_steps=2)

        def step():
            me = md.get_replica_context().replica_id
            kept = md.constant(np.full(40000, 4.0, "f4"))
            optimizer.apply_gradients([(kept, w)], 0 if me == idle else 2)
            return kept

        for _ in range(2):
            for kept in md.local_results(strategy.run(step)):
                assert (kept.numpy() == 4).all()
        assert (w.numpy() == 6).all()
