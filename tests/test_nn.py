"""Layers: shapes, names, variables, what training changes, and errors that name the layer."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import context, nn, ops
from minidist.errors import ContextError, ShapeError, UsageError


@pytest.fixture(autouse=True)
def seeded():
    context.seed(3)
    yield
    context.seed(0)


def small() -> nn.Sequential:
    return nn.Sequential(
        [
            nn.Conv2D(4, 3, strides=2),
            nn.BatchNorm(),
            nn.ReLU(),
            nn.Conv2D(6, (1, 2), padding="VALID"),
            nn.MaxPool(2, strides=1),
            nn.AveragePool(2, padding="SAME"),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Dense(5),
            nn.ReLU(),
            nn.Dense(2, use_bias=False),
        ]
    )


def test_shapes_and_names():
    model = small()
    assert model.build((9, 9, 1)) == (2,)
    assert [layer.output_shape for layer in model.layers] == [
        (5, 5, 4),
        (5, 5, 4),
        (5, 5, 4),
        (5, 4, 6),
        (4, 3, 6),
        (2, 2, 6),
        (24,),
        (24,),
        (5,),
        (5,),
        (2,),
    ]
    assert [(v.name, v.shape, v.trainable) for v in model.variables] == [
        ("conv/kernel", (3, 3, 1, 4), True),
        ("conv/bias", (4,), True),
        ("batch_norm/gamma", (4,), True),
        ("batch_norm/beta", (4,), True),
        ("batch_norm/moving_mean", (4,), False),
        ("batch_norm/moving_variance", (4,), False),
        ("conv_1/kernel", (1, 2, 4, 6), True),
        ("conv_1/bias", (6,), True),
        ("dense/kernel", (24, 5), True),
        ("dense/bias", (5,), True),
        ("dense_1/kernel", (5, 2), True),
    ]
    assert model.trainable_variables == [v for v in model.variables if v.trainable]
    for training in (False, True):
        for n in (3, 0):
            x = np.ones((n, 9, 9, 1), "float32")
            y = model(x, training)
            assert (y.shape, y.dtype) == ((n, 2), np.float32)


def test_layers_compute_what_the_operations_do():
    x = np.random.default_rng(0).standard_normal((2, 6, 6, 3))
    conv, dense = nn.Conv2D(4, 3, strides=2, padding="VALID"), nn.Dense(5)
    model = nn.Sequential([conv, nn.GlobalAveragePool(), dense])
    model.build((6, 6, 3), "float64")
    conv.bias.assign(np.arange(4.0))
    h = ops.conv2d(x, conv.kernel, 2, "VALID").numpy() + np.arange(4.0)
    expected = h.mean((1, 2)) @ dense.kernel.numpy() + dense.bias.numpy()
    np.testing.assert_allclose(model(x), expected, rtol=1e-12)


def test_gradients_reach_all_trainable_variables():
    model = small()
    model.build((9, 9, 1))
    x = np.random.default_rng(0).standard_normal((4, 9, 9, 1)).astype("float32")
    with md.GradientTape() as tape:
        loss = ops.reduce_mean(ops.square(model(x, training=True)))
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
    ):
        assert gradient.shape == variable.shape


def test_batch_norm_trains_its_moving_averages_and_uses_them():
    layer = nn.BatchNorm(momentum=0.75, epsilon=0.1)
    layer.build((3,), "float64")
    x = np.random.default_rng(0).standard_normal((8, 3)) + 5
    y = layer(x, training=True)
    np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 0.1), rtol=1e-9)
    mean, variance = 0.25 * x.mean(0), 0.75 + 0.25 * x.var(0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-12)
    np.testing.assert_allclose(layer(x), (x - mean) / np.sqrt(variance + 0.1), rtol=1e-9)
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-12)


def test_an_empty_batch_does_not_move_the_averages():
    layer = nn.BatchNorm()
    layer.build((3,))
    assert layer(np.zeros((0, 3), "float32"), training=True).shape == (0, 3)
    assert layer.moving_mean.numpy().tolist() == [0, 0, 0]
    assert layer.moving_variance.numpy().tolist() == [1, 1, 1]


def test_dropout_drops_in_training_only_and_each_layer_and_call_on_its_own():
    one, two = nn.Dropout(0.5), nn.Dropout(0.5)
    nn.Sequential([one, two]).build((1000,))
    x = np.ones((1, 1000), "float32")
    np.testing.assert_array_equal(one(x), x)
    drawn = [layer(x, training=True).numpy() for layer in (one, one, two)]
    for i, y in enumerate(drawn):
        assert set(np.unique(y)) == {0, 2}
        assert 400 < np.count_nonzero(y) < 600
        for other in drawn[:i]:
            assert (y != other).any()
    context.seed(3)
    np.testing.assert_array_equal(one(x, training=True), drawn[0])


def test_initial_values_repeat_with_the_seed_and_differ_between_variables():
    def kernels() -> list[np.ndarray]:
        context.seed(5)
        random = nn.truncated_normal(1.0)
        model = nn.Sequential(
            [nn.Dense(9, kernel_initializer=random, bias_initializer=random) for _ in range(2)]
        )
        model.build((9,))
        return [v.numpy().ravel()[:9] for v in model.variables]

    first, again = kernels(), kernels()
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == np.size(first)


def test_sequentials_nest():
    def block(width: int) -> nn.Sequential:
        return nn.Sequential(
            [nn.Dense(width), nn.Dropout(0.1), nn.Dense(width)], name=f"block_{width}"
        )

    model = nn.Sequential([block(2), nn.ReLU(), nn.Sequential([block(3), nn.Dense(1)])])
    model.build((4,))
    assert [v.name for v in model.variables if "kernel" in v.name] == [
        "block_2/dense/kernel",
        "block_2/dense_1/kernel",
        "sequential/block_3/dense/kernel",
        "sequential/block_3/dense_1/kernel",
        "sequential/dense/kernel",
    ]
    numbers = []

    def collect(layers: list[nn.Layer]) -> None:
        for layer in layers:
            if isinstance(layer, nn.Sequential):
                collect(layer.layers)
            else:
                numbers.append(layer.number)

    collect(model.layers)
    assert numbers == list(range(8))
    assert model(np.ones((2, 4), "float32"), training=True).shape == (2, 1)


def test_given_names_come_first():
    layers = [nn.ReLU(), nn.ReLU(name="relu"), nn.ReLU(), nn.ReLU(name="relu_2")]
    model = nn.Sequential(layers)
    assert [layer.name for layer in model.layers] == ["relu_1", "relu", "relu_3", "relu_2"]


def test_a_layer_stands_once_in_a_model():
    relu = nn.ReLU()
    with pytest.raises(UsageError, match="twice in 'model'"):
        nn.Sequential([relu, relu], name="model")
    with pytest.raises(UsageError, match="'a'"):
        nn.Sequential([nn.ReLU(name="a"), nn.Flatten(name="a")])


def test_errors_name_the_layer_and_the_shapes():
    model = nn.Sequential([nn.Flatten(), nn.Dense(3, name="last")])
    with pytest.raises(ContextError, match=r"not built.*build\(\(4,\)\)"):
        model(np.ones((2, 4), "float32"))
    model.build((4,))
    with pytest.raises(ContextError, match="built already"):
        model.build((4,))
    with pytest.raises(ShapeError, match=r"\(4,\).*\(2, 5\)"):
        model(np.ones((2, 5), "float32"))
    with pytest.raises(ShapeError, match=r"'wide'.*\(2, 3, 1\)"):
        nn.Dense(3, name="wide").build((2, 3, 1))
    with pytest.raises(ShapeError, match=r"'pool'.*\(2, 2, 1\).*\(3, 3\)"):
        nn.Sequential([nn.MaxPool(2), nn.MaxPool(3, name="pool")]).build((4, 4, 1))
    with pytest.raises(ShapeError, match=r"'conv'.*\(5,\)"):
        nn.Sequential([nn.Conv2D(1, 1)]).build((5,))
    with pytest.raises(UsageError, match=r"1\.5"):
        nn.Dropout(1.5)


@pytest.mark.parametrize("units", [-1, 0, 2.5, "a", None, True])
def test_sizes_of_layers_are_whole_numbers_above_0(units):
    with pytest.raises(UsageError, match=r"dense: units must be a whole number above 0, not"):
        nn.Dense(units)
    with pytest.raises(UsageError, match=r"conv: filters must be a whole number above 0, not"):
        nn.Conv2D(units, 3)


@pytest.mark.parametrize("shape", [4, (None, 4), (-1,), (2.5,), "ab", None])
def test_build_takes_the_shape_of_one_example(shape):
    with pytest.raises(ShapeError, match="build takes the shape of one example"):
        nn.Sequential([nn.Dense(2)]).build(shape)


def test_a_sequential_holds_layers():
    with pytest.raises(UsageError, match="3 is no layer"):
        nn.Sequential([3])


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sequential", nn.Sequential),
        ("residual", nn.Residual),
        ("shortcut", lambda layers: nn.Residual([nn.Dense(4)], layers)),
    ],
)
def test_layers_of_layers_take_a_list_with_something_in_it(kind, make):
    for single in (nn.Dense(4), 3):
        with pytest.raises(UsageError, match=f"{kind}: the layers must be a list, .*{single!r}"):
            make(single)
    with pytest.raises(UsageError, match=f"{kind}: the list of layers is empty"):
        make([])
