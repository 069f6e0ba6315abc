"""Residual blocks and fused activations: against NumPy, and against layers that fuse nothing."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import context, nn, ops
from minidist.errors import ShapeError, UsageError
from minidist.kernels import plain
from minidist.train import train_step

EPSILON = 1e-5


@pytest.fixture(autouse=True)
def seeded():
    context.seed(3)
    yield
    context.seed(0)


def block(**options) -> nn.Residual:
    return nn.Residual(
        [
            nn.Conv2D(4, 3, strides=2, padding=((1, 1), (1, 1)), use_bias=False),
            nn.BatchNorm(activation="relu"),
            nn.Conv2D(5, 3, use_bias=False),
            nn.BatchNorm(),
        ],
        [nn.Conv2D(5, 1, strides=2, use_bias=False), nn.BatchNorm()],
        **options,
    )


def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 6, 6, 2))


def convolved(x: np.ndarray, kernel: np.ndarray, strides: int) -> np.ndarray:
    kh, kw, _, k = kernel.shape
    output = (x.shape[1] // strides,) * 2
    windows = plain.Windows(output, (kh, kw), (strides,) * 2, (kh // 2, kw // 2))
    return plain.im2col(x, windows) @ kernel.reshape(-1, k)


def normalized(x: np.ndarray) -> np.ndarray:
    return (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + EPSILON)


@pytest.mark.parametrize("activation", ["relu", None])
def test_a_block_in_numpy(activation):
    model, x = block(activation=activation), images()
    model.build((6, 6, 2), "float64")
    first, second, beside = (v.numpy() for v in model.variables if "kernel" in v.name)
    h = plain.relu(normalized(convolved(x, first, 2)))
    y = normalized(convolved(h, second, 1)) + normalized(convolved(x, beside, 2))
    wanted = y if activation is None else plain.relu(y)
    np.testing.assert_allclose(model(x, training=True), wanted, rtol=1e-9, atol=1e-12)


def test_a_body_may_end_in_an_activation_of_its_own_in_numpy():
    body = [nn.Conv2D(2, 3, use_bias=False), nn.BatchNorm(activation="relu")]
    model, x = nn.Residual(body, activation=None), images()
    model.build((6, 6, 2), "float64")
    kernel = model.variables[0].numpy()
    wanted = plain.relu(normalized(convolved(x, kernel, 1))) + x
    np.testing.assert_allclose(model(x, training=True), wanted, rtol=1e-9, atol=1e-12)


def test_its_variables_are_named_by_their_place():
    model = nn.Sequential([nn.Conv2D(2, 1), block(), block()])
    model.build((6, 6, 2))
    names = [variable.name for variable in model.trainable_variables]
    assert names[:3] == ["conv/kernel", "conv/bias", "residual/conv/kernel"]
    assert "residual/shortcut/batch_norm/gamma" in names
    assert "residual_1/batch_norm_1/beta" in names
    assert len(set(names)) == len(names) == 20


class Unfused(nn.Layer):
    """The same as a layer, but with an operation for each thing that it does."""

    def __init__(self, of: nn.Layer) -> None:
        super().__init__(of.name)
        self.of = of
        self.variables = of.variables
        self.input_shape, self.output_shape = of.input_shape, of.output_shape

    def _call(self, x, training):
        of = self.of
        if isinstance(of, nn.Residual):
            y = self._through(of.layers, x)
            beside = x if of.shortcut is None else self._through(of.shortcut.layers, x)
            y = ops.add(y, beside)
        elif isinstance(of, nn.Sequential):
            return self._through(of.layers, x)
        elif isinstance(of, nn.BatchNorm):
            y, _, _ = ops.batch_norm(x, of.gamma, of.beta, of.epsilon)
        elif isinstance(of, nn.Conv2D):
            y = ops.conv2d(x, of.kernel, of.strides, of.padding)
            y = ops.bias_add(y, of.bias) if of.use_bias else y
        elif isinstance(of, nn.Dense):
            y = ops.bias_add(ops.matmul(x, of.kernel), of.bias)
        else:
            return of(x, training)
        return ops.relu(y) if of.relu else y

    def _through(self, layers, x):
        for layer in layers:
            x = Unfused(layer)(x, True)
        return x


def losses_and_gradients(call, variables, x):
    with md.GradientTape() as tape:
        loss = ops.reduce_mean(ops.square(call(x, training=True)))
    return [loss.numpy(), *(gradient.numpy() for gradient in tape.gradient(loss, variables))]


def test_what_is_fused_gives_the_bits_of_what_is_not():
    model = nn.Sequential(
        [
            nn.Conv2D(3, 3, activation="relu"),
            block(),
            nn.Residual([nn.Conv2D(5, 1), nn.ReLU()]),  # a body that fuses nothing
            nn.Residual([nn.Conv2D(5, 3, use_bias=False), nn.BatchNorm()]),
            nn.GlobalAveragePool(),
            nn.Dense(4, activation="relu"),
        ]
    )
    model.build((6, 6, 2))
    for variable in model.trainable_variables:  # biases and offsets too
        variable.assign(
            np.random.default_rng(variable.size).standard_normal(variable.shape).astype("f")
        )
    x = images().astype("float32")
    fused = losses_and_gradients(model, model.trainable_variables, x)
    unfused = losses_and_gradients(Unfused(model), model.trainable_variables, x)
    for one, other in zip(fused, unfused, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_fused_activation_changes_no_initial_value():
    apart = nn.Sequential([nn.Dense(3), nn.ReLU(), nn.Dense(2)])
    fused = nn.Sequential([nn.Dense(3, activation="relu"), nn.Dense(2)])
    for model in (apart, fused):
        context.seed(3)
        model.build((4,))
    for one, other in zip(apart.variables, fused.variables, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_moving_averages_follow_in_one_meeting(monkeypatch):
    calls = []
    real = nn.moving.assign_moving_averages

    def counted(variables, *rest, **options):
        calls.append(len(variables))
        real(variables, *rest, **options)

    monkeypatch.setattr(nn.moving, "assign_moving_averages", counted)
    model, x = nn.Sequential([block(), nn.BatchNorm(momentum=0.5)]), images()
    model.build((6, 6, 2), "float64")
    model(x, training=True)
    assert calls == [6, 2]  # for each momentum one
    inner = model.layers[0](x, training=True).numpy()
    mean = 0.5 * inner.mean((0, 1, 2))
    np.testing.assert_allclose(model.layers[1].moving_mean.numpy(), mean, rtol=1e-9)


class Shifted(nn.Layer):
    """Adds what tells replicas apart."""

    def _call(self, x, training):
        return x + float(md.get_replica_context().replica_id)


class Halved(nn.Layer):
    """Makes two examples of each."""

    def _build(self, shape, dtype):
        return (shape[0] // 2,)

    def _call(self, x, training):
        return ops.reshape(x, (x.shape[0] * 2, x.shape[1] // 2))


@pytest.mark.parametrize("sizes", [(3, 3), (3, 1), (0, 2), (2, 0)])
def test_moving_averages_of_the_first_replica_and_of_all_are_in_one_model(sizes):
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            layers = [nn.BatchNorm(moving=moving) for moving in ("first", "mean")]
            model = nn.Sequential([layers[0], Shifted(), layers[1], Halved(), nn.BatchNorm()])
            model.build((4,), "float64")
        xs = [np.arange(n * 4.0).reshape(n, 4) + 10 * r for r, n in enumerate(sizes)]
        strategy.run(lambda: model(xs[md.get_replica_context().replica_id], training=True))
        first, mean, last = (layer.moving_mean.numpy() for layer in (*layers, model.layers[4]))
    of_first = 0.1 * xs[0].mean(0) if sizes[0] else np.zeros(4)  # without an example, none
    np.testing.assert_allclose(first, of_first)
    np.testing.assert_allclose(mean, np.full(4, 0.1 * sizes[1] / sum(sizes)))
    np.testing.assert_allclose(last, np.zeros(2), atol=1e-12)


def test_each_moving_average_has_its_own_counts():
    with md.Strategy("cpu*3") as strategy:
        with strategy.scope():
            averages = [md.Variable(np.zeros(2), name=name) for name in "abc"]
        counts = [(1, 0, 0), (3, 2, 0), (0, 1, 0)]  # by replica

        def step():
            me = md.get_replica_context().replica_id
            value = md.constant(np.full(2, np.nan if me == 0 else me, "f8"))
            values = [md.constant(np.full(2, 8.0 * me)), value, value]
            md.moving_average.assign_moving_averages(averages, values, 0.5, count=counts[me])

        strategy.run(step)
        for average, wanted in zip(averages, (0.5 * 24 / 4, 0.5 * 4 / 3, 0), strict=True):
            for copy in average.copies:
                np.testing.assert_allclose(copy.array, [wanted, wanted])


def test_moving_averages_of_a_pass_that_fails_are_forgotten():
    class Failing(nn.Layer):
        def _call(self, x, training):
            raise ZeroDivisionError

    model = nn.Sequential([nn.BatchNorm(), Failing()])
    model.build((2,))
    x = np.ones((3, 2), "float32")
    with pytest.raises(ZeroDivisionError):
        model(x, training=True)
    assert model.layers[0].moving_mean.numpy().tolist() == [0, 0]
    model.layers[0](x, training=True)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), [0.1, 0.1])


def test_what_cannot_be_added_is_told():
    model = nn.Sequential([nn.Residual([nn.Conv2D(3, 3, strides=2)], name="first")])
    with pytest.raises(ShapeError, match=r"first.*\(3, 3, 3\).*beside it is \(6, 6, 2\)"):
        model.build((6, 6, 2))


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: nn.Dense(2, activation="tanh"), "'relu'"),
        (lambda: nn.Conv2D(2, 1, activation="tanh"), "'relu'"),
        (lambda: nn.BatchNorm(activation="tanh"), "'relu', 'relu6'"),
        (lambda: nn.Residual([nn.Dense(2)], activation="tanh"), "'relu'"),
    ],
)
def test_other_activations_are_refused(make, known):
    with pytest.raises(UsageError, match=f"'tanh' is not known; it may be {known} or None"):
        make()


def trained(policy: str) -> list[np.ndarray]:
    """Return all variables, moving averages too, after some steps on two replicas."""
    context.seed(3)
    with md.Strategy("cpu*2", policy) as strategy:
        with strategy.scope():
            model = nn.Sequential([block(), nn.GlobalAveragePool(), nn.Dense(3)])
            model.build((6, 6, 2))
            optimizer = md.optim.Momentum(0.1)
        x, labels = images().astype("float32"), np.arange(3)
        for _ in range(3):  # of unequal parts
            for batch in strategy.distribute_dataset([(x, labels)]):
                strategy.run(train_step, model, optimizer, *batch)
        return [variable.numpy() for variable in model.variables]


def test_all_policies_give_the_same_bits():
    first, *others = [
        trained(policy) for policy in ("replicated", "parameter_server", "distributed_replicated")
    ]
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, two)
