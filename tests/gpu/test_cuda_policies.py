"""Whole training steps of every policy on the stand-in: replicas that share a GPU, and two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import cuda
from policies import EVERY, optimizer
from standin import GPUS

import minidist as md

RULES = ["sgd", "nesterov", "rmsprop", "adam"]
SHAPES = [(), (3,), (7, 11), (3, 1, 4, 2)]
SPECS = ["cuda:0*3", f"cuda*{GPUS}"]
STEPS = 5


def train(spec: str, policy: str, step: Callable[..., Any], starts: Any, **options: Any) -> Any:
    """Return what replica 0 reads after some steps, and what the steps have returned there."""
    name, policy_options = EVERY[policy]
    with md.Strategy(spec, name, **policy_options, **options) as strategy:
        with strategy.scope():
            variables = [md.Variable(start, name=f"v{i}") for i, start in enumerate(starts)]
        md.context.seed(1)
        losses = [strategy.run(step, variables, i) for i in range(STEPS)]
        read = strategy.run(lambda: [variable.numpy() for variable in variables])
        first = strategy.local_results
        return [first(each)[0] for each in read], [np.array(first(loss)) for loss in losses]


def given(rule: str) -> Callable[..., Any]:
    """Apply gradients that come from random numbers, so that the CPU has the same bits."""
    opt = optimizer(rule, 0.01)

    def step(variables: list[Any], number: int) -> None:
        rng = np.random.default_rng([number, md.get_replica_context().replica_id])
        gradients = [md.constant(rng.normal(size=v.shape).astype(np.float32)) for v in variables]
        opt.apply_gradients(zip(gradients, variables, strict=True))

    return step


def two_layers(rule: str) -> Callable[..., Any]:
    """Minimise the loss of a small net; gradients are summed in buckets while others are made."""
    opt = optimizer(rule)

    def step(variables: list[Any], number: int) -> Any:
        rng = np.random.default_rng([number, md.get_replica_context().replica_id])
        x, labels = rng.normal(size=(6, 8)).astype(np.float32), rng.integers(0, 3, 6)
        a, b, c = variables

        def loss() -> Any:
            h = md.ops.relu(md.ops.matmul(md.constant(x), a) + b)
            h = md.ops.dropout(h, 0.2, *md.context.draw(0))
            logits = md.ops.matmul(h, c)
            return md.ops.reduce_mean(md.ops.softmax_cross_entropy(logits, md.constant(labels)))

        return opt.minimize(loss, variables, count=6)

    return step


def starts(shapes: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", EVERY)
def test_given_gradients_lead_to_the_cpus_bits(
    libraries: Path, policy: str, rule: str, spec: str
) -> None:
    n = 3 if spec == SPECS[0] else GPUS
    want, _ = train(f"cpu*{n}", policy, given(rule), starts(SHAPES))
    with cuda(libraries, hash_of(policy, rule)):
        got, _ = train(spec, policy, given(rule), starts(SHAPES))
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("policy", EVERY)
def test_training_is_as_on_the_cpu(libraries: Path, policy: str, spec: str) -> None:
    n = 3 if spec == SPECS[0] else GPUS
    net = starts([(8, 9), (9,), (9, 3)])
    want, losses = train(f"cpu*{n}", policy, two_layers("adam"), net)
    for seed in range(2):
        with cuda(libraries, seed):
            got, ours = train(spec, policy, two_layers("adam"), net)
        for one, other in zip([*got, *ours], [*want, *losses], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "spec", ["copy", "pscpu#2", "psgpu", "xring", "rechd", "hierarchical_copy"]
)
def test_every_way_to_sum(libraries: Path, spec: str) -> None:
    want, _ = train("cpu*4", "replicated", given("sgd"), starts(SHAPES), all_reduce_spec=spec)
    with cuda(libraries, 4):
        devices = "cuda:0.0,cuda:0.1,cuda:1.0,cuda:1.1"
        got, _ = train(devices, "replicated", given("sgd"), starts(SHAPES), all_reduce_spec=spec)
    for one, other in zip(got, want, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_model_of_convolutions_with_batches_read_ahead(libraries: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 8, 8, 1)).astype(np.float32)
    labels = rng.integers(0, 3, 8)

    def run(spec: str) -> list[float]:
        md.context.seed(1)
        with md.Strategy(spec, "replicated") as strategy:
            with strategy.scope():
                layers = [md.nn.Conv2D(4, 3), md.nn.BatchNorm(), md.nn.ReLU(), md.nn.MaxPool(2)]
                model = md.nn.Sequential([*layers, md.nn.Flatten(), md.nn.Dense(3)])
                model.build(images.shape[1:])
            opt = md.optim.Momentum(0.1)

            def step(batch: Any) -> Any:
                def loss() -> Any:
                    logits = model(batch[0], training=True)
                    return md.ops.reduce_mean(md.ops.softmax_cross_entropy(logits, batch[1]))

                return opt.minimize(loss, model.trainable_variables, count=len(batch[1]))

            batches = strategy.distribute_dataset([(images, labels)] * 3)
            losses = [strategy.run(step, batch) for batch in batches]
            return [float(strategy.reduce("mean", loss)) for loss in losses]

    want = run("cpu*2")
    with cuda(libraries, 1):
        assert run("cuda:0*2") == pytest.approx(want, rel=1e-4)


def test_no_step_after_the_second_makes_memory(libraries: Path) -> None:
    with cuda(libraries, 0):
        devices = md.devices("cuda:0*2")
        with md.Strategy(devices, "replicated") as strategy:
            with strategy.scope():
                variables = [md.Variable(start) for start in starts([(8, 9), (9,), (9, 3)])]
            step, made = two_layers("nesterov"), []
            for i in range(12):
                strategy.run(step, variables, i)
                for device in devices:
                    device.synchronize()
                made.append([device.made for device in devices])
    assert made[1:] == made[1:2] * 11


def hash_of(*words: str) -> int:
    return sum(map(ord, "".join(words)))
