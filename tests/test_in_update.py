"""Sums in updates: the bits of sums that are taken first, whatever replicas bring."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import ops
from minidist.optim import LossScale

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
    "equal": (4, 4, 4),
    "unequal": (3, 1, 5),
    "one": (0, 3, 0),
    "some": (2, 0, 5),
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


@pytest.mark.parametrize("replicas", [2, 3])
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


def test_four_replicas_take_their_sums_first():
    with md.Strategy("cpu*4", overlap=False) as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(8, "f4"), name="w")
        optimizer = md.optim.SGD(0.5)
        with md.Bytes(strategy) as moved:
            strategy.run(lambda: optimizer.minimize(lambda: ops.reduce_sum(w), [w]))
        assert set(moved.measured) == {f"cpu:{r}->host" for r in range(4)} | {
            f"host->cpu:{r}" for r in range(4)
        }
        assert (w.numpy() == 0.5).all()


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
