"""Layers that densenet, inception and mobilenet are made of: Concat, depthwise, ReLU6, no scale."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import context, nn, ops
from minidist.errors import ShapeError, UsageError
from minidist.kernels import plain
from minidist.train import train_step


@pytest.fixture(autouse=True)
def seeded():
    context.seed(3)
    yield
    context.seed(0)


def images(dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 6, 6, 2)).astype(dtype)


def branches() -> list[list[nn.Layer]]:
    return [
        [],
        [nn.Conv2D(3, 1), nn.BatchNorm(activation="relu6", scale=False), nn.DepthwiseConv2D(3)],
        [nn.MaxPool(3, strides=1, padding="SAME")],
    ]


def test_branches_are_joined_in_their_order():
    model = nn.Concat(branches())
    assert model.build((6, 6, 2), "float64") == (6, 6, 2 + 3 + 2)
    x = images()
    kernel, bias, _, _, _, filters = (variable.numpy() for variable in model.variables)
    windows = plain.Windows((6, 6), (3, 3), (1, 1), (1, 1))
    h = x @ kernel[0, 0] + bias
    h = np.clip((h - h.mean((0, 1, 2))) / np.sqrt(h.var((0, 1, 2)) + 1e-5), 0, 6)
    parts = [x, plain.depthwise(h, filters, windows), plain.max_pool(x, windows)[0]]
    np.testing.assert_allclose(model(x, training=True), np.concatenate(parts, 3), rtol=1e-9)


def test_its_variables_are_named_by_their_place():
    model = nn.Sequential([nn.Concat(branches()), nn.Concat([[nn.Conv2D(1, 1)]], name="last")])
    model.build((6, 6, 2))
    assert [variable.name for variable in model.variables] == [
        "concat/branch_1/conv/kernel",
        "concat/branch_1/conv/bias",
        "concat/branch_1/batch_norm/beta",
        "concat/branch_1/batch_norm/moving_mean",
        "concat/branch_1/batch_norm/moving_variance",
        "concat/branch_1/depthwise_conv/kernel",
        "last/branch_0/conv/kernel",
        "last/branch_0/conv/bias",
    ]


def test_layers_of_different_branches_draw_different_numbers():
    model = nn.Concat([[nn.Conv2D(2, 1)], [nn.Conv2D(2, 1)], [nn.Dropout(0.5)], [nn.Dropout(0.5)]])
    nn.Sequential([model])
    model.build((40, 40, 2))
    assert (model.variables[0].numpy() != model.variables[2].numpy()).all()
    y = model(np.ones((1, 40, 40, 2), "float32"), training=True).numpy()
    assert (y[..., 4:6] != y[..., 6:]).any()


def test_leaves_are_those_of_all_branches_and_what_joins_them():
    model = nn.Sequential([nn.Concat(branches())])
    kinds = [leaf.kind for leaf in model.leaves()]
    assert kinds == ["conv", "batch_norm", "depthwise_conv", "max_pool", "concat"]


def test_shapes_that_cannot_be_joined_name_the_layer():
    with pytest.raises(ShapeError, match=r"'concat'.*\(6, 6, 2\), \(3, 3, 2\).*last length"):
        nn.Sequential([nn.Concat([[], [nn.MaxPool(2)]])]).build((6, 6, 2))


@pytest.mark.parametrize("wrong", [[], nn.ReLU(), 3])
def test_branches_are_a_list_of_lists(wrong):
    with pytest.raises(UsageError, match="concat: the branches must be a list of lists"):
        nn.Concat(wrong)
    with pytest.raises(UsageError, match="branch_0: the layers must be a list"):
        nn.Concat([nn.ReLU()])


def test_a_layer_has_one_place():
    twice = nn.ReLU()
    for branches in ([[twice], [twice]], [[twice], [nn.MaxPool(2), nn.Sequential([twice])]]):
        with pytest.raises(UsageError, match="both: a layer stands in two places of its branches"):
            nn.Concat(branches, name="both")


@pytest.mark.parametrize("scale", [True, False])
def test_a_normalisation_without_scale_is_one_whose_scale_is_1(scale):
    layer = nn.BatchNorm(scale=scale)
    layer.build((6, 6, 2))
    assert [v.name for v in layer.trainable_variables] == [
        *(["batch_norm/gamma"] if scale else []),
        "batch_norm/beta",
    ]
    beta, ones, x = np.float32([0.5, -1]), np.ones(2, "float32"), images("float32")
    layer.beta.assign(beta)
    y, mean, variance = ops.batch_norm(x, ones, beta)
    np.testing.assert_array_equal(layer(x, training=True), y)
    layer.moving_mean.assign(mean)
    layer.moving_variance.assign(variance)
    wanted = ops.batch_norm_inference(x, ones, beta, mean, variance)
    np.testing.assert_array_equal(layer(x), wanted)


def test_relu6_lies_between_0_and_6_and_nan_goes_through():
    x = md.constant(np.array([-1.0, 0, 2, 6, 7, np.inf, np.nan]))
    with md.GradientTape() as tape:
        tape.watch(x)
        y = ops.relu6(x)
    np.testing.assert_array_equal(y, [0, 0, 2, 6, 6, 6, np.nan])
    assert tape.gradient(y, x).numpy().tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_a_layer_that_takes_relu6_leaves_the_next_its_number():
    apart = nn.Sequential([nn.BatchNorm(), nn.ReLU(), nn.Dense(2)])
    fused = nn.Sequential([nn.BatchNorm(activation="relu6"), nn.Dense(2)])
    assert apart.layers[-1].number == fused.layers[-1].number == 2


def test_a_depthwise_layer_has_a_filter_for_each_channel():
    layer = nn.DepthwiseConv2D((3, 2), strides=2, padding="VALID")
    assert layer.build((6, 6, 2), "float64") == (2, 3, 2)
    kernel = layer.kernel.numpy()
    assert kernel.shape == (3, 2, 2)
    whole = np.zeros((3, 2, 2, 2))
    whole[:, :, [0, 1], [0, 1]] = kernel  # the same as a filter that mixes channels
    np.testing.assert_allclose(layer(images()), ops.conv2d(images(), whole, 2, "VALID"), rtol=1e-12)
    with pytest.raises(ShapeError, match=r"'depthwise_conv'.*\(5,\)"):
        nn.Sequential([nn.DepthwiseConv2D(1)]).build((5,))


def test_depthwise_filters_that_do_not_fit_are_told():
    with pytest.raises(ShapeError, match=r"depthwise_conv2d: images \(3, 6, 6, 2\).*\(3, 3, 3\)"):
        ops.depthwise_conv2d(images(), np.zeros((3, 3, 3)))
    with pytest.raises(ShapeError, match=r"concat: shapes \(2, 3\), \(3, 2\) cannot be joined"):
        ops.concat([np.zeros((2, 3)), np.zeros((3, 2))])
    with pytest.raises(UsageError, match="concat: there is nothing to join"):
        ops.concat([])


def trained(policy: str) -> list[np.ndarray]:
    """Return all variables, moving averages too, after some steps on two replicas."""
    context.seed(3)
    with md.Strategy("cpu*2", policy) as strategy:
        with strategy.scope():
            model = nn.Sequential([nn.Concat(branches()), nn.GlobalAveragePool(), nn.Dense(3)])
            model.build((6, 6, 2))
            optimizer = md.optim.Momentum(0.1)
        x, labels = images("float32"), np.arange(3)
        for _ in range(3):  # of unequal parts
            for batch in strategy.distribute_dataset([(x, labels)]):
                strategy.run(train_step, model, optimizer, *batch)
        return [variable.numpy() for variable in model.variables]


def test_policies_give_the_same_bits():
    one, other = trained("replicated"), trained("parameter_server")
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
