"""Every spec under every synchronous policy: the oracle's weights, in the order of its class."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import relative_norm
from orders import ORDER, SUMS
from policies import Trainer, optimizer, oracle, same_bits

import minidist as md
from minidist import context, train

SHAPES = [(), (3,), (7, 11), (0, 2), (40, 31)]
COUNTS = [None, [4, 4, 4, 4, 4], [5, 4, 3, 2, 1], [0, 2, 3, 0, 1]]
BOUND = 1e-5  # relative norm in float32, across classes


def combine(spec, narrow=None):
    """Return how the oracle combines: a sum in the order of a spec, narrow if wanted, and 1/n."""

    def rounded(array):
        return array if narrow is None else np.asarray(array.astype(narrow).astype(array.dtype))

    def mean(gradients, counts, r):
        gradients = [rounded(gradient) for gradient in gradients]
        weighted, divisor = gradients, len(gradients)
        if counts is not None and len(set(counts)) > 1:
            weighted = [r(c) * g for c, g in zip(counts, gradients, strict=True) if c]
            divisor = sum(counts)
        return rounded(np.asarray(SUMS[ORDER[spec]](weighted))), 1 / divisor

    return mean


@pytest.mark.parametrize("spec", ORDER)
@pytest.mark.parametrize("policy", ["replicated", "parameter_server"])
def test_given_gradients_lead_to_the_oracles_bits(policy, spec):
    n = 5
    for narrow, options in ((None, {}), (np.float16, {"compact_gradient_transfer": True})):
        rng = np.random.default_rng(3)

        def arrays(rng=rng):
            return [np.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES]

        starts = [arrays()] * n
        expected = oracle(policy, "momentum", starts, combine=combine(spec, narrow))
        opt = optimizer("momentum")
        with Trainer(policy, starts, all_reduce_spec=spec, **options) as trainer:
            for counts in COUNTS:
                gradients = [arrays() for _ in range(n)]
                trainer.apply(opt, gradients, counts)
                expected.step(gradients, counts)
                trainer.check(expected.weights)


def train_mlp(policy, spec, n=4, **options):
    """Return the weights of an mlp after three steps on uneven batches, the same in all runs."""
    rng = np.random.default_rng(8)
    context.seed(11)
    with md.Strategy(f"cpu*{n}", policy, all_reduce_spec=spec, **options) as strategy:
        with strategy.scope():
            model = md.models.build("mlp", (4, 4, 1), 10, "float32")
        batches = [
            (rng.normal(size=(size, 4, 4, 1)).astype("float32"), rng.integers(10, size=size))
            for size in (8, 7, 2)
        ]
        opt = md.optim.Momentum(0.01)
        for images, labels in strategy.distribute_dataset(batches):
            strategy.run(train.train_step, model, opt, images, labels)
        assert len(set(train.weights_checksums(strategy, model))) == 1
        return [variable.numpy() for variable in model.trainable_variables]


@pytest.fixture(scope="module")
def by_default():
    return train_mlp("replicated", "auto")


@pytest.fixture(scope="module")
def in_the_order():
    """Weights of the first spec of each class that was trained."""
    return {}


@pytest.mark.parametrize("policy", ["replicated", "parameter_server"])
@pytest.mark.parametrize("spec", ORDER)
def test_every_spec_trains_to_the_same_weights(policy, spec, by_default, in_the_order):
    """Decision 1: bit for bit within a class, else within the bound."""
    weights = train_mlp(policy, spec)
    assert relative_norm(weights, by_default) <= BOUND
    first = in_the_order.setdefault(ORDER[spec], weights)
    assert all(map(same_bits, weights, first))
    if ORDER[spec] == "serial":
        assert all(map(same_bits, weights, by_default))


@pytest.mark.parametrize("spec", ["auto", "xring#2", "rechd"])
def test_packing_and_overlap_change_no_bit(spec):
    plain = train_mlp("replicated", spec, overlap=False)
    for options in (
        {"gradient_repacking": 3},
        {"agg_small_grads_max_bytes": 4096, "agg_small_grads_max_group": 3},
        {"overlap": True, "bucket_cap_mb": 0.001},
        {"local_parameter_device": "device"},
    ):
        weights = train_mlp("replicated", spec, **options)
        assert all(map(same_bits, weights, plain)), options


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_what_is_compact_trains_to_the_same_bits_under_every_synchronous_policy(narrow):
    """For gradients alone: what a user reduces is not rounded."""
    results = [
        train_mlp(policy, "auto", compact_gradient_transfer=narrow)
        for policy in ("replicated", "parameter_server")
    ]
    assert all(map(same_bits, *results))
    assert not all(map(same_bits, results[0], train_mlp("replicated", "auto")))
    with md.Strategy("cpu*2", compact_gradient_transfer=narrow) as strategy:
        losses = md.PerReplica(strategy.devices, [md.constant(0.1), md.constant(0.2)])
        assert float(strategy.reduce("sum", losses)) == float(np.float32(0.1) + np.float32(0.2))
