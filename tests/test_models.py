"""Models: their sizes as published, other data shapes, and one step of learning."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import context, models, ops
from minidist.errors import ShapeError, UsageError


def parameters(model) -> int:
    return sum(variable.size for variable in model.trainable_variables)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("mlp", (28, 28, 1), 10, 1_863_690),
        ("lenet", (28, 28, 1), 10, 1_663_370),
        ("lenet", (8, 8, 1), 10, 832 + 51_264 + (2 * 2 * 64 + 1) * 512 + 5_130),
        ("lenet", (32, 32, 3), 10, 2_432 + 51_264 + (8 * 8 * 64 + 1) * 512 + 5_130),
        ("mlp", (8, 8, 1), 3, 65 * 1024 + 1025 * 1024 + 1025 * 3),
        ("trivial", (8, 8, 1), 10, 65 + 2 * 4096 + 4097 * 10),
    ],
)
def test_sizes(name, shape, classes, count):
    model = models.build(name, shape, classes)
    assert parameters(model) == count
    assert model(np.zeros((2, *shape), "float32")).shape == (2, classes)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"vgg.*trivial, mlp, lenet"):
        models.build("vgg", (28, 28, 1), 10)


def test_images_that_are_too_small_name_the_layer():
    with pytest.raises(ShapeError, match=r"max_pool_1.*\(1, 1, 64\)"):
        models.build("lenet", (3, 3, 1), 10)


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_a_step_against_the_gradient_lowers_the_loss(name):
    context.seed(1)
    model = models.build(name, (8, 8, 1), 10, dtype="float64")
    rng = np.random.default_rng(0)
    x, labels = rng.random((16, 8, 8, 1)), rng.integers(0, 10, 16)

    def loss() -> md.Tensor:
        return ops.reduce_mean(ops.softmax_cross_entropy(model(x, training=True), labels))

    with md.GradientTape() as tape:
        before = loss()
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(before, model.trainable_variables), strict=True
    ):
        variable.assign(variable.numpy() - 0.05 * gradient.numpy())
    assert before.item() == pytest.approx(np.log(10), abs=1.0)
    assert loss().item() < before.item()
