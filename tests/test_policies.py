"""Every policy with every optimizer follows the oracle step by step, given gradients bitwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RULES, TwoLayers, relative_norm, split
from policies import POLICIES, SYNCHRONOUS, Trainer, optimizer, oracle, same_bits
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
from minidist import context, train

LARGE = [(40_003,), (129, 131), ()]  # beyond the 16 Ki elements where threads begin


# --- given gradients: bit for bit ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("weight_decay", [0, 0.01])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_given_gradients_lead_to_the_oracles_bits(policy, rule, weight_decay, n, dtype):
    rng = np.random.default_rng(n)
    starts = [arrays(rng, SHAPES, dtype) for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=weight_decay)
    opt = optimizer(rule, weight_decay)
    with Trainer(policy, starts) as trainer:
        trainer.check(expected.weights)
        for counts in schedule(n):
            gradients = given_gradients(rng, SHAPES, dtype, counts, n)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)
            assert opt.iterations == expected.iterations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_and_threads_change_no_bit(policy, rule, dtype):
    n = 3
    rng = np.random.default_rng(0)
    starts = [arrays(rng, LARGE, dtype) for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    with Trainer(policy, starts) as trainer:
        for counts in [None, [4, 3, 3], [2, 2, 0]]:
            gradients = given_gradients(rng, LARGE, dtype, counts, n)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)


@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_a_gradient_behind_which_there_is_no_example_counts_for_nothing(policy):
    starts = [[np.ones(3)]] * 3
    gradients = [[np.full(3, 1e9)], [np.array([1.0, 2.0, 4.0])], [np.array([3.0, 2.0, 0.0])]]
    with Trainer(policy, starts) as trainer:
        trainer.apply(md.optim.SGD(1.0), gradients, [0, 2, 2])
        trainer.check([[np.array([-1.0, -1.0, -1.0])]] * 3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_global_batch_without_any_example_is_no_step(policy, rule):
    """Also where momentum or weight decay would move the weights without a gradient."""
    n = 2
    rng = np.random.default_rng(4)
    starts = [arrays(rng, SHAPES, "float64") for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    with Trainer(policy, starts) as trainer:
        for counts in [[0, 0], [2, 1], [0, 0], [1, 1]]:
            gradients = given_gradients(rng, SHAPES, "float64", counts, n)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)
    assert opt.iterations == expected.iterations == 2


# --- gradients from the tape --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_follows_the_oracle_step_by_step(policy, rule, n, dtype):
    rng = np.random.default_rng(10 + n)
    starts = [TwoLayers.start(rng, dtype) for _ in range(n)]
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    with Trainer(policy, starts) as trainer:
        for examples in [6 * n, 6 * n - 1, 4 * n + 1, n, max(1, n - 1), 1]:
            counts = split(examples, n)
            batches = parts(*global_batch(rng, examples, dtype), counts)

            def step(replica, batches=batches, counts=counts):
                with md.GradientTape() as tape:
                    loss = two_layers(trainer.variables, *batches[replica])
                gradients = tape.gradient(loss, trainer.variables)
                opt.apply_gradients(
                    zip(gradients, trainer.variables, strict=True), count=counts[replica]
                )
                return float(loss)

            losses = trainer.each(step)
            for replica in range(n):
                right = TwoLayers.loss(expected.weights[replica], *batches[replica])
                assert losses[replica] == pytest.approx(right, rel=BOUND[dtype], abs=BOUND[dtype])
            expected.step(
                [
                    TwoLayers.gradients(w, *batch)
                    for w, batch in zip(expected.weights, batches, strict=True)
                ],
                counts,
            )
            for read, right in zip(trainer.weights(), expected.weights, strict=True):
                assert relative_norm(read, right) <= BOUND[dtype]


def train_two_layers(policy, n, rule, dtype):
    """Train the oracle's TwoLayers on global batches split over n; return what each reads."""
    rng = np.random.default_rng(5)
    with Trainer(policy, [TwoLayers.start(rng, dtype)] * n) as trainer:
        opt = optimizer(rule, 0.01)
        for examples in [9, 8, 7, 2]:
            batches = parts(*global_batch(rng, examples, dtype), split(examples, n))
            trainer.each(
                lambda replica, batches=batches: opt.minimize(
                    lambda: two_layers(trainer.variables, *batches[replica]),
                    trainer.variables,
                    count=len(batches[replica][1]),
                )
            )
        return trainer.weights()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_replicated_and_parameter_server_train_to_the_same_bits(rule, dtype):
    results = [w for policy in SYNCHRONOUS for w in train_two_layers(policy, 3, rule, dtype)]
    assert len(results) == 9
    for weights in results:
        assert all(same_bits(a, b) for a, b in zip(weights, results[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", DEVICES)
@pytest.mark.parametrize("rule", RULES)
def test_every_optimizer_agrees_with_one_device_that_has_the_whole_batch(rule, n, dtype):
    whole = train_two_layers("independent", 1, rule, dtype)[0]
    for weights in train_two_layers("replicated", n, rule, dtype):
        assert relative_norm(weights, whole) <= BOUND[dtype]


# --- whole models -------------------------------------------------------------------------------


SIZES = [10, 7, 3]  # examples in the global batches; the last leaves some replicas empty


def train_model(name, policy, n, dtype, rule="nesterov", **options):
    """Train a model of `models/` on random images; return its weights and all checksums."""
    rng = np.random.default_rng(8)
    context.seed(11)
    variable_update, policy_options = POLICIES[policy]
    strategy = md.Strategy(f"cpu*{n}", variable_update, **policy_options, **options)
    opt = optimizer(rule, 1e-3)
    opt.lr = 0.01
    with strategy:
        with strategy.scope():
            model = md.models.build(name, (8, 8, 1), 10, dtype)
        batches = [
            (rng.normal(size=(size, 8, 8, 1)).astype(dtype), rng.integers(10, size=size))
            for size in SIZES
        ]
        for images, labels in strategy.distribute_dataset(batches):
            strategy.run(train.train_step, model, opt, images, labels)
        weights = [variable.numpy() for variable in model.trainable_variables]
        return weights, train.weights_checksums(strategy, model)


@pytest.fixture(scope="module")
def on_one_device():
    """Weights after training on one device with the whole batch, by model and dtype."""
    cache = {}

    def get(name, dtype):
        if (name, dtype) not in cache:
            cache[name, dtype] = train_model(name, "independent", 1, dtype)[0]
        return cache[name, dtype]

    return get


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mlp", "lenet"])
@pytest.mark.parametrize(
    ("policy", "n"),
    [
        ("replicated", 1),
        ("replicated", 2),
        ("replicated", 5),
        ("parameter_server", 3),
    ],
)
def test_n_devices_agree_with_one_device_that_has_the_whole_batch(
    on_one_device, name, policy, n, dtype
):
    weights, checksums = train_model(name, policy, n, dtype)
    assert relative_norm(weights, on_one_device(name, dtype)) <= BOUND[dtype]
    assert len(checksums) == n
    assert len(set(checksums)) == 1


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_checksums_are_equal_where_the_policy_promises_it(name):
    replicated = train_model(name, "replicated", 3, "float32")[1]
    assert set(replicated) == set(train_model(name, "parameter_server", 3, "float32")[1])
    assert len(set(replicated)) == 1
    assert len(set(train_model(name, "independent", 3, "float32")[1])) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_bits_with_threads_and_in_turns(policy):
    checksums = [
        train_model("lenet", policy, 2, "float32", "adam", concurrent=concurrent)[1]
        for concurrent in [True, True, False]
    ]
    assert checksums[0] == checksums[1] == checksums[2]


# --- random programs ----------------------------------------------------------------------------


@st.composite
def programs(draw):
    n = draw(st.integers(1, 4))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4)
    )
    steps = draw(
        st.lists(
            st.tuples(
                st.none() | st.lists(st.integers(0, 9), min_size=n, max_size=n).filter(any),
                st.lists(st.booleans(), min_size=n * len(shapes), max_size=n * len(shapes)).filter(
                    any
                ),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return {
        "n": n,
        "shapes": shapes,
        "steps": steps,
        "rule": draw(st.sampled_from(sorted(RULES))),
        "weight_decay": draw(st.sampled_from([0, 0.01])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=60, deadline=None)
@given(programs())
def test_random_programs_give_the_same_bits_under_all_synchronous_policies(program):
    n, shapes, dtype = program["n"], program["shapes"], program["dtype"]
    results = []
    for policy in SYNCHRONOUS:
        rng = np.random.default_rng(program["seed"])
        starts = [arrays(rng, shapes, dtype)] * n
        opt = optimizer(program["rule"], program["weight_decay"])
        expected = oracle(policy, program["rule"], starts, weight_decay=program["weight_decay"])
        with Trainer(policy, starts) as trainer:
            for counts, used in program["steps"]:
                mask = iter(used)
                gradients = [
                    [gradient if next(mask) else None for gradient in arrays(rng, shapes, dtype)]
                    for _ in range(n)
                ]
                trainer.apply(opt, gradients, counts)
                expected.step(gradients, counts)
            trainer.check(expected.weights)
            results.append(trainer.weights()[0])
    for weights in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(weights, results[0], strict=True))
