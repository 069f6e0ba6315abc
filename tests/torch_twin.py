"""A model and the same network in PyTorch, with the same weights: their losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist import context, models, nn, ops

torch = pytest.importorskip("torch")


def compare(
    name: str,
    side: int,
    theirs: Callable[[Iterator[Any], Any], Any],
    *,
    label_smoothing: float = 0.0,
    tolerance: float = 1e-7,
) -> None:
    """Assert that a model of ten classes and its twin agree on four random images, in float64.

    theirs: makes logits of the weights one by one, and of images [n, c, h, w].
    tolerance: of the gradients.
    """
    context.seed(1)
    model = models.build(name, (side, side, 3), 10, dtype="float64")
    for layer in model.leaves():
        if isinstance(layer, nn.Dropout):
            layer.rate = 0
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((4, side, side, 3)), rng.integers(0, 10, 4)
    ours = model.trainable_variables
    for weight in ours:
        if weight.ndim == 1:  # else scales would be 1, and offsets 0
            weight.assign(weight.numpy() + 0.05 * rng.standard_normal(weight.shape))
    with md.GradientTape() as tape:
        logits = model(x, training=True)
        loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels, label_smoothing))
    gradients = tape.gradient(loss, ours)

    weights = [torch.tensor(weight.numpy(), requires_grad=True) for weight in ours]
    left = iter(weights)
    wanted = torch.nn.functional.cross_entropy(
        theirs(left, torch.tensor(x.transpose(0, 3, 1, 2))),
        torch.tensor(labels),
        label_smoothing=label_smoothing,
    )
    assert next(left, None) is None
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=tolerance / 1000)
    for gradient, weight in zip(gradients, weights, strict=True):
        other = weight.grad.numpy()
        # A bias before a normalisation has none.
        bound = tolerance / 100 * np.abs(other).max() + 1e-12
        np.testing.assert_allclose(gradient.numpy(), other, rtol=tolerance, atol=bound)
