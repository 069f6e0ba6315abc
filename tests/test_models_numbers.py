"""Numbers of models that no size tells of: rates, constants, kinds of pooling, initial values.

They are written here from the papers, or from tf_cnn_benchmarks where a model follows it. None of
the layers needs variables for that, so nothing is built.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidist import nn
from minidist.initializers import Initializer
from minidist.models import MODELS
from minidist.random import Stream

CUT = 0.8796  # a standard normal that is cut off at ±2 has this deviation
SHAPES = {"mlp": (28, 28, 1), "lenet": (28, 28, 1), "alexnet": (227, 227, 3), "transformer": (64,)}

HALF_TWICE, NONE = [0.5, 0.5], []
RESNET = (0.9, 1e-5, True, True)  # momentum, epsilon, whether there is a scale, whether all decays
INCEPTION = (0.999, 1e-3, False, False)
MOBILENET = (0.997, 1e-3, True, True)
HALVES = ("max_pool", 2, 2, "VALID")
THREES = ("max_pool", 3, 2, "VALID")
THREES_SAME = ("max_pool", 3, 2, "SAME")
BESIDE = ("max_pool", 3, 1, "SAME")
MEANS = ("average_pool", 3, 1, "SAME")
TOP = "global_average_pool"

# By the first part of the name: rates of dropout, the batch normalisations, and how often there is
# which pooling.
NUMBERS = {
    "trivial": (NONE, None, {}),
    "mlp": (NONE, None, {}),
    "lenet": (NONE, None, {HALVES: 2}),
    "alexnet": (HALF_TWICE, None, {THREES: 3}),
    "overfeat": (HALF_TWICE, None, {HALVES: 3}),
    "vgg": (HALF_TWICE, None, {HALVES: 5}),
    "googlenet": (NONE, None, {THREES_SAME: 4, BESIDE: 9, TOP: 1}),
    "inception3": (NONE, INCEPTION, {THREES: 4, MEANS: 8, BESIDE: 1, TOP: 1}),
    "inception4": ([0.2], INCEPTION, {THREES: 4, MEANS: 14, TOP: 1}),
    **dict.fromkeys(
        ("resnet50", "resnet101", "resnet152"),
        (NONE, RESNET, {("max_pool", 3, 2, ((1, 1), (1, 1))): 1, TOP: 1}),
    ),
    "resnet": (NONE, RESNET, {TOP: 1}),
    "densenet": (NONE, RESNET, {("average_pool", 2, 2, "VALID"): 2, TOP: 1}),
    "mobilenet": ([0.2], MOBILENET, {TOP: 1}),
    "transformer": (NONE, None, {}),
}


def leaves(name: str, shape: tuple[int, ...] | None = None) -> list[nn.Layer]:
    """Return the layers of a model that has no variables yet."""
    return MODELS[name].make(shape or SHAPES.get(name, (224, 224, 3)), 10).leaves()


@pytest.mark.parametrize("name", MODELS)
def test_rates_normalisations_and_poolings(name: str) -> None:
    found = leaves(name)
    rates, norm, pools = next(NUMBERS[key] for key in NUMBERS if name.startswith(key))
    assert [layer.rate for layer in found if isinstance(layer, nn.Dropout)] == rates
    norms = {
        (layer.momentum, layer.epsilon, layer.scale, layer.decays)
        for layer in found
        if isinstance(layer, nn.BatchNorm)
    }
    assert norms == ({norm} if norm else set())
    kinds = sorted(
        (
            (layer.kind, layer.size, layer.strides, layer.padding)
            if isinstance(layer, nn.MaxPool)
            else layer.kind
            for layer in found
            if "pool" in layer.kind
        ),
        key=str,
    )
    assert {kind: len(list(same)) for kind, same in itertools.groupby(kinds)} == pools


def deviation(start: Initializer) -> float:
    """Return which deviation an initializer of a truncated normal was given."""
    values = start((400, 500), "float32", Stream((1, 0), (0, 0, 0)))
    return float(values.std()) / CUT


def test_the_small_alexnet_is_that_of_the_tutorial() -> None:
    found = leaves("alexnet", (32, 32, 3))
    norms = [each for each in found if isinstance(each, nn.LocalResponseNorm)]
    assert len(norms) == 2
    for norm in norms:
        constants = norm.radius, norm.bias, norm.alpha, norm.beta
        assert constants == (4, 1.0, pytest.approx(0.001 / 9), 0.75)
    pools = [each for each in found if isinstance(each, nn.MaxPool)]
    assert [(each.size, each.strides, each.padding) for each in pools] == [(3, 2, "SAME")] * 2
    with_kernels = [each for each in found if isinstance(each, (nn.Conv2D, nn.Dense))]
    deviations = [deviation(each.kernel_initializer) for each in with_kernels]
    assert deviations == pytest.approx([0.05, 0.05, 0.04, 0.04, 1 / 192], rel=0.01)
    biases = [
        each.bias_initializer((2,), "float32", Stream((1, 0), (0, 0, 0))) for each in with_kernels
    ]
    wanted = np.repeat(np.float32([0, 0.1, 0.1, 0.1, 0]), 2).reshape(5, 2)
    np.testing.assert_array_equal(biases, wanted)


def test_initial_values_that_are_not_the_usual_ones() -> None:
    mobile = {
        round(deviation(each.kernel_initializer), 2)
        for each in leaves("mobilenet")[:9] + leaves("mobilenet")[-1:]
        if isinstance(each, (nn.Conv2D, nn.DepthwiseConv2D, nn.Dense))
    }
    assert mobile == {0.09}

    trivial = [each for each in leaves("trivial", (8, 8, 1)) if isinstance(each, nn.Dense)]
    found = [deviation(each.kernel_initializer) for each in trivial]
    assert found == pytest.approx([(2 / 64) ** 0.5, 2**0.5, 1 / 64], rel=0.01)

    embedding, positions, *blocks = leaves("transformer")
    assert isinstance(embedding, nn.Embedding) and isinstance(positions, nn.Positions)
    dense = [each.kernel_initializer for each in blocks if isinstance(each, nn.Dense)]
    found = [deviation(each) for each in (embedding.initializer, positions.initializer, *dense)]
    first, last = 0.02, 0.02 / 8**0.5  # of the last layer of what is added
    block = [first, last, first, last]
    assert found == pytest.approx([first, first, *(4 * block), first], rel=0.01)
