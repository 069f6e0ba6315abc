"""Models: their sizes as published, other data shapes, and one step of learning."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import context, models, nn, ops
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
    with pytest.raises(UsageError, match=r"vgg'; there are trivial, mlp, lenet, "):
        models.build("vgg", (28, 28, 1), 10)


def test_images_that_are_too_small_name_the_layer():
    with pytest.raises(ShapeError, match=r"max_pool_1.*\(1, 1, 64\)"):
        models.build("lenet", (3, 3, 1), 10)


@pytest.mark.parametrize(
    ("name", "shape", "rate", "apart"),
    [
        ("mlp", (8, 8, 1), 0.01, 1.0),
        ("lenet", (8, 8, 1), 0.01, 1.0),
        ("resnet20_v2", (8, 8, 3), 0.01, 1.0),
        ("densenet40_k12", (8, 8, 3), 0.01, 1.0),
        # Images of one pixel at its end, normalised over 16 numbers: its loss is steep and rough.
        ("mobilenet", (9, 9, 3), 1e-5, 2.0),
    ],
)
def test_a_step_against_the_gradient_lowers_the_loss(name, shape, rate, apart):
    context.seed(1)
    model = models.build(name, shape, 10)
    for layer in model.leaves():
        if isinstance(layer, nn.Dropout):
            layer.rate = 0
    rng = np.random.default_rng(0)
    x, labels = rng.random((16, *shape), np.float32), rng.integers(0, 10, 16)

    def loss() -> md.Tensor:
        return ops.reduce_mean(ops.softmax_cross_entropy(model(x, training=True), labels))

    with md.GradientTape() as tape:
        before = loss()
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(before, model.trainable_variables), strict=True
    ):
        variable.assign(variable.numpy() - rate * gradient.numpy())
    assert before.item() == pytest.approx(np.log(10), abs=apart)
    assert loss().item() < before.item()
    assert model(x[:0]).shape == (0, 10)


def test_resnets_halve_their_images_as_published():
    small, large, late = (
        models.MODELS[name].make((), 10) for name in ("resnet20", "resnet50", "resnet50_v1.5")
    )
    blocks = [layer for layer in small.layers if isinstance(layer, nn.Residual)]
    assert small.build((32, 32, 3)) == (10,)
    assert [block.output_shape for block in blocks] == (
        [(32, 32, 16)] * 3 + [(16, 16, 32)] * 3 + [(8, 8, 64)] * 3
    )
    assert [block.shortcut is not None for block in blocks] == [False] * 3 + 2 * [
        *(True, False, False)
    ]

    # By the first convolution of a block, the 1×1, or by the 3×3 behind it.
    for network, halving in ((large, [2, 1, 1]), (late, [1, 2, 1])):
        strided = [
            [layer.strides for layer in block.layers if isinstance(layer, nn.Conv2D)]
            for block in network.layers
            if isinstance(block, nn.Residual)
        ]
        assert strided == (
            [[1, 1, 1]] * 3
            + [halving, *[[1, 1, 1]] * 3]
            + [halving, *[[1, 1, 1]] * 5]
            + [halving, *[[1, 1, 1]] * 2]
        )


def test_the_second_version_of_resnet_normalises_before_it_convolves():
    model = models.MODELS["resnet20_v2"].make((), 10)
    assert [layer.kind for layer in model.layers] == [
        "conv",
        *["residual"] * 3,
        *(["batch_norm", "residual", "residual", "residual"] * 2),
        "batch_norm",
        "global_average_pool",
        "dense",
    ]
    blocks = [layer for layer in model.layers if isinstance(layer, nn.Residual)]
    for block in blocks:
        kinds = [layer.kind for layer in block.layers]
        first = [] if block.shortcut else ["batch_norm"]  # of which the shortcut has the result too
        assert kinds == [*first, "conv", "batch_norm", "conv"]
        assert not block.relu


def test_the_gradient_of_resnet20_is_its_slope():
    context.seed(1)
    model = models.build("resnet20", (8, 8, 3), 10, dtype="float64")
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((4, 8, 8, 3)), rng.integers(0, 10, 4)
    weights = model.trainable_variables
    starts = [weight.numpy() + 0.1 * rng.standard_normal(weight.shape) for weight in weights]
    directions = [rng.standard_normal(weight.shape) for weight in weights]

    def loss(step: float = 0) -> md.Tensor:
        for weight, start, direction in zip(weights, starts, directions, strict=True):
            weight.assign(start + step * direction)
        return ops.reduce_mean(ops.softmax_cross_entropy(model(x, training=True), labels))

    with md.GradientTape() as tape:
        target = loss()
    gradients = tape.gradient(target, weights)
    slope = sum(
        float((gradient.numpy() * direction).sum())
        for gradient, direction in zip(gradients, directions, strict=True)
    )
    h = 1e-7  # small enough to cross few kinks
    assert (loss(h).item() - loss(-h).item()) / (2 * h) == pytest.approx(slope, rel=1e-4)
