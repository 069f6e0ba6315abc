"""Trainings that are the same on every device, for tests to compare what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from policies import EVERY, optimizer

import minidist as md

SHAPES = [(), (3,), (7, 11), (3, 1, 4, 2)]
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


def of_images(spec: str, layers: Callable[[], list[md.nn.Layer]]) -> list[float]:
    """Return the losses of a network of such layers, trained on batches that are read ahead."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(8, 8, 8, 1)).astype(np.float32), rng.integers(0, 3, 8)
    md.context.seed(1)
    with md.Strategy(spec, "replicated") as strategy:
        with strategy.scope():
            model = md.nn.Sequential(layers())
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
