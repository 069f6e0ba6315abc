"""Policies in which something is a step late follow the oracle, which knows how late and what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RULES, TwoLayers, accumulated, relative_norm, split
from policies import CACHING, EVERY, LATE, POLICIES, Trainer, optimizer, oracle, same_bits
from scenarios import (
    BOUND,
    DEVICES,
    DTYPES,
    SHAPES,
    arrays,
    given_gradients,
    global_batch,
    parts,
    schedule,
    two_layers,
)

import minidist as md


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [*LATE, *CACHING])
def test_given_gradients_lead_to_the_oracles_bits(policy, rule, n, dtype):
    """Weights, what replicas read, and steps without any example."""
    rng = np.random.default_rng(n)
    starts = [arrays(rng, SHAPES, dtype) for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    with Trainer(policy, starts) as trainer:
        trainer.check(expected.weights, expected.reads)
        for counts in schedule(n):
            gradients = given_gradients(rng, SHAPES, dtype, counts, n)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights, expected.reads)
            assert opt.iterations == expected.iterations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", LATE)
def test_training_follows_the_oracle_step_by_step(policy, rule, n, dtype):
    """Gradients from the tape, of what replicas read, by minimize."""
    rng = np.random.default_rng(10 + n)
    starts = [TwoLayers.start(rng, dtype) for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    with Trainer(policy, starts) as trainer:
        for examples in [6 * n, 6 * n - 1, n, max(1, n - 1), 1]:
            counts = split(examples, n)
            batches = parts(*global_batch(rng, examples, dtype), counts)
            losses = trainer.each(
                lambda replica, batches=batches, counts=counts: float(
                    opt.minimize(
                        lambda: two_layers(trainer.variables, *batches[replica]),
                        trainer.variables,
                        count=counts[replica],
                    )
                )
            )
            for reads, batch, loss in zip(expected.reads, batches, losses, strict=True):
                right = TwoLayers.loss(reads, *batch)
                assert loss == pytest.approx(right, rel=BOUND[dtype], abs=BOUND[dtype])
            expected.step(
                [
                    TwoLayers.gradients(reads, *batch)
                    for reads, batch in zip(expected.reads, batches, strict=True)
                ],
                counts,
            )
            for copy, right in zip(copies(trainer), expected.weights, strict=True):
                assert relative_norm(copy, right) <= BOUND[dtype]


def copies(trainer):
    """Return each replica's copies, or the one copy as each replica's."""
    return [
        [variable.copies[replica % len(variable.copies)].array for variable in trainer.variables]
        for replica in range(trainer.n)
    ]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("policy", EVERY)
def test_clipping_and_the_loss_scale_are_in_the_oracle_too(policy, n):
    """Whole numbers as gradients: so the norm is the same in any order of summation."""
    rng = np.random.default_rng(3)
    starts = [arrays(rng, SHAPES, "float32") for _ in range(n)]
    for options, names in [
        ({"clip": 2.5}, {"gradient_clip": 2.5}),
        ({"clip_norm": 3.3, "loss_scale": 10.0}, {"gradient_clip_norm": 3.3, "loss_scale": 10.0}),
    ]:
        expected = oracle(policy, "nesterov", starts, weight_decay=0.01, **options)
        opt = optimizer("nesterov", 0.01, **names)
        with Trainer(policy, starts) as trainer:
            for counts in [None, [1, 2, 4][:n], [0] * n, [3, 0, 0][:n], None]:
                gradients = [
                    [np.asarray(rng.integers(-9, 9, shape), "float32") for shape in SHAPES]
                    for _ in range(n)
                ]
                trainer.apply(opt, gradients, counts)
                expected.step(gradients, counts)
                trainer.check(expected.weights, expected.reads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", EVERY)
def test_accumulated_gradients_are_one_step(policy, dtype):
    n, calls = 2, 3
    rng = np.random.default_rng(6)
    starts = [arrays(rng, SHAPES, dtype) for _ in range(n)]
    expected = oracle(policy, "adam", starts)
    opt = optimizer("adam", gradient_accumulation_steps=calls)
    with Trainer(policy, starts) as trainer:
        for counts in [None, [[2, 3, 4], [1, 0, 2]], [[1, 1, 1], [0, 0, 0]], None]:
            batches = [[arrays(rng, SHAPES, dtype) for _ in range(calls)] for _ in range(n)]
            for call in range(calls):
                trainer.apply(
                    opt,
                    [batches[replica][call] for replica in range(n)],
                    counts and [counts[replica][call] for replica in range(n)],
                )
                if call < calls - 1:
                    trainer.check(expected.weights, expected.reads)  # nothing is applied yet
            merged = [
                accumulated(batches[replica], counts and counts[replica]) for replica in range(n)
            ]
            expected.step(
                [gradients for gradients, _ in merged], counts and [count for _, count in merged]
            )
            trainer.check(expected.weights, expected.reads)
            assert opt.iterations == expected.iterations


@pytest.mark.parametrize("policy", LATE)
def test_turns_give_the_same_bits(policy):

    def train(concurrent):
        rng = np.random.default_rng(5)
        opt = optimizer("momentum", 0.01)
        starts = [TwoLayers.start(rng, "float32")] * 2
        with Trainer(policy, starts, concurrent=concurrent) as trainer:
            for examples in [9, 8, 7, 2]:
                batches = parts(*global_batch(rng, examples, "float32"), split(examples, 2))
                trainer.each(
                    lambda replica, batches=batches: opt.minimize(
                        lambda: two_layers(trainer.variables, *batches[replica]),
                        trainer.variables,
                        count=len(batches[replica][1]),
                    )
                )
            return [*copies(trainer)[0], *trainer.weights()[1]]

    results = [train(concurrent) for concurrent in [True, True, False]]
    for weights in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(weights, results[0], strict=True))


@st.composite
def programs(draw):
    n = draw(st.integers(1, 4))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4)
    )
    counts = st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n)
    size = n * len(shapes)
    used = st.lists(st.booleans(), min_size=size, max_size=size).filter(any)
    return {
        "n": n,
        "shapes": shapes,
        "steps": draw(st.lists(st.tuples(counts, used), min_size=1, max_size=6)),
        "policy": draw(st.sampled_from([*LATE, *CACHING, *POLICIES])),
        "rule": draw(st.sampled_from(sorted(RULES))),
        "weight_decay": draw(st.sampled_from([0, 0.01])),
        "clip": draw(st.sampled_from([None, 0.5])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60, deadline=None)
@given(programs())
def test_random_programs_give_the_oracles_bits(program):
    n, shapes, dtype = program["n"], program["shapes"], program["dtype"]
    rng = np.random.default_rng(program["seed"])
    starts = [arrays(rng, shapes, dtype)] * n
    how = program["policy"], program["rule"]
    opt = optimizer(how[1], program["weight_decay"], gradient_clip=program["clip"])
    options = {"weight_decay": program["weight_decay"], "clip": program["clip"]}
    expected = oracle(*how, starts, **options)
    with Trainer(how[0], starts) as trainer:
        for counts, used in program["steps"]:
            if how[0] == "independent":  # where each replica needs something that is used
                used = [True] * len(used)
            mask = iter(used)
            gradients = [
                [gradient if next(mask) else None for gradient in arrays(rng, shapes, dtype)]
                for _ in range(n)
            ]
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights, expected.reads)


def test_the_names_say_what_is_late():
    for policy in LATE:
        name, options = LATE[policy]
        with md.Strategy("cpu*2", name, **options) as strategy:
            assert strategy.variable_mgr.name == policy.replace("_device", "")


# --- relaxed: what waits, waits for one optimizer -----------------------------------------------


def relaxed_steps(steps):
    """Do steps with one variable of value 1 at the start; return it, and the strategy's own."""
    with md.Strategy("cpu*2", variable_consistency="relaxed") as strategy:
        with strategy.scope():
            a, b = (md.Variable(np.ones(()), name=name) for name in "ab")
        for step in steps:
            strategy.run(step, a, b)
        return float(a.copies[1].array), float(b.copies[1].array)


def give(opt, *pairs):
    opt.apply_gradients([(md.constant(np.float64(value)), variable) for value, variable in pairs])


def test_two_optimizers_of_the_same_variables_get_back_what_each_has_brought():
    one, other = md.optim.SGD(0.1), md.optim.SGD(0.0)

    def step(a, b):
        give(one, (1.0, a))
        give(other, (1000.0, a))

    a, _ = relaxed_steps([step] * 4)
    assert a == 1 - 0.1 - 0.1 - 0.1


def test_a_variable_keeps_its_waiting_gradient_when_others_join_and_leave(tmp_path):
    opt = md.optim.SGD(0.5)
    alone = [lambda a, b, v=v: give(opt, (v, a)) for v in (1.0, 2.0, 4.0)]
    both = [lambda a, b, v=v: give(opt, (v, a), (10 * v, b)) for v in (8.0, 16.0)]
    # a: 0, 1, 2, 4, 8, then again alone 16, 1; b: 0, 80, and 160 waits until the end.
    a, b = relaxed_steps([*alone, *both, *alone[:2]])
    assert a == 1 - 0.5 * (1 + 2 + 4 + 8 + 16 + 1)
    assert b == 1 - 0.5 * 80

    def save(a, b):
        md.get_replica_context().merge_call(lambda strategy: md.save(tmp_path / "x", [a, b], opt))

    relaxed_steps(
        [lambda a, b: give(opt, (1.0, a), (1.0, b)), lambda a, b: give(opt, (1.0, a)), save]
    )
