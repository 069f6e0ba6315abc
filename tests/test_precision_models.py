"""Layers, variables and whole models with float16 and bfloat16 activations."""

from __future__ import annotations

import numpy as np
import pytest
from narrow import DTYPES, EPSILON, bits, nearest, normal, whole, wide

import minidist as md
from minidist import context, nn, ops, train
from minidist.errors import ShapeError
from minidist.tape import GradientTape

both = pytest.mark.parametrize("dtype", DTYPES)
F32 = np.dtype(np.float32)

LAYERS = {
    "dense": (lambda: nn.Dense(5), (7,)),
    "dense without bias": (lambda: nn.Dense(5, use_bias=False), (7,)),
    "convolution": (lambda: nn.Conv2D(4, 3), (6, 6, 2)),
    "depthwise": (lambda: nn.DepthwiseConv2D(3), (6, 6, 2)),
    "batch norm": (lambda: nn.BatchNorm(), (3, 3, 2)),
    "relu6": (lambda: nn.BatchNorm(activation="relu6", scale=False), (3, 3, 2)),
    "concat": (lambda: nn.Concat([[], [nn.Conv2D(2, 1)]]), (3, 3, 2)),
    "max pool": (lambda: nn.MaxPool(2), (4, 4, 2)),
    "average pool": (lambda: nn.AveragePool(2), (4, 4, 2)),
    "global pool": (lambda: nn.GlobalAveragePool(), (4, 4, 2)),
    "relu": (lambda: nn.ReLU(), (4,)),
    "dropout": (lambda: nn.Dropout(0.5), (4,)),
    "flatten": (lambda: nn.Flatten(), (2, 3)),
}


@both
@pytest.mark.parametrize("batch", [3, 0])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_in_the_dtype_of_its_input(name, batch, dtype):
    make, shape = LAYERS[name]
    layer = make()
    layer.build(shape)
    for training in (True, False):
        x = ops.constant(normal((batch, *shape), dtype, 1))
        with GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training)
        assert y.dtype == DTYPES[dtype] and y.shape == (batch, *layer.output_shape)
        dx, *dw = tape.gradient(y, [x, *layer.trainable_variables])
        assert dx.dtype == DTYPES[dtype] and dx.shape == x.shape
        assert all(gradient.dtype == F32 for gradient in dw)
    assert all(variable.dtype == F32 for variable in layer.variables)


@both
def test_variables_are_rounded_where_they_are_used_and_so_are_their_gradients(dtype):
    context.seed(3)
    layer = nn.Dense(3)
    layer.build((5,))
    layer.bias.assign([0.1, 0.2, 0.3])
    x, dy = whole((4, 5), dtype, 1, most=4), whole((4, 3), dtype, 2, most=4)
    kernel, bias = (
        wide(nearest(v.numpy(), dtype).astype(np.uint16).view(DTYPES[dtype]))
        for v in (layer.kernel, layer.bias)
    )
    with GradientTape() as tape:
        y = layer(x)
        target = ops.cast(y, "float32") * wide(dy)
    dw, db = tape.gradient(target, [layer.kernel, layer.bias])
    assert (bits(y) == nearest(wide(x) @ kernel + bias, dtype)).all()
    for gradient, exact in ((dw, wide(x).T @ wide(dy)), (db, wide(dy).sum(0))):
        assert (bits(gradient.numpy().astype(DTYPES[dtype])) == nearest(exact, dtype)).all()
        assert gradient.dtype == F32


@both
def test_moving_averages_follow_float32_moments(dtype):
    layer = nn.BatchNorm(momentum=0.0)
    layer.build((2,))
    x = normal((50, 2), dtype, 1)
    layer(ops.constant(x), training=True)
    np.testing.assert_allclose(layer.moving_mean.numpy(), wide(x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), wide(x).var(0), rtol=1e-5)


# --- variables that are narrow themselves ---------------------------------------------------------


@both
def test_a_narrow_variable_is_assigned_and_saved_but_not_trained(dtype, tmp_path):
    variable = md.Variable([0.1, 2.0], dtype=dtype, name="v")
    assert variable.dtype == DTYPES[dtype]
    assert (bits(variable.numpy()) == nearest([0.1, 2.0], dtype)).all()
    variable.assign([1.0, 0.3])
    variable.assign_add([1.0, 0.0])
    assert (bits(variable.numpy()) == nearest([2.0, 0.3], dtype)).all()
    md.save(tmp_path / "state", variables=[variable])
    variable.assign([0.0, 0.0])
    md.load(tmp_path / "state", variables=[variable])
    assert (bits(variable.numpy()) == nearest([2.0, 0.3], dtype)).all()
    with GradientTape() as tape:
        loss = ops.l2_loss(variable)
    gradient = tape.gradient(loss, variable)
    assert gradient.dtype == DTYPES[dtype]
    with pytest.raises(ShapeError, match=f"'v' is {dtype}.*float32"):
        md.optim.SGD(0.1).distributed_apply([(gradient, variable)])


@both
def test_a_narrow_model_computes(dtype):
    layer = nn.Sequential([nn.Conv2D(2, 3), nn.BatchNorm(), nn.Flatten(), nn.Dense(3)])
    layer.build((4, 4, 1), dtype)
    assert {variable.dtype for variable in layer.trainable_variables} == {DTYPES[dtype]}
    for training in (True, False):
        assert layer(normal((2, 4, 4, 1), dtype, 1), training).dtype == DTYPES[dtype]
    assert {v.dtype for v in layer.variables if not v.trainable} == {F32}


@both
@pytest.mark.parametrize("n", [1, 3])
def test_what_replicas_have_is_added_up_in_float32(n, dtype):
    parts = [whole((5 + i, 2), dtype, i) for i in range(n)]
    rows = [part[:5] for part in parts]
    with md.Strategy(f"cpu*{n}", "replicated") as strategy:
        with strategy.scope():
            kept = md.Variable(
                np.zeros((5, 2)),
                dtype=dtype,
                synchronization=md.VariableSynchronization.ON_READ,
                aggregation=md.VariableAggregation.MEAN,
            )

        def replica():
            here = md.get_replica_context()
            row = ops.constant(rows[here.replica_id])
            kept.assign(row)
            return ops.constant(parts[here.replica_id]), row, here.all_reduce("mean", row)

        part, row, mean = strategy.run(replica)
        total = sum(map(wide, rows)) * np.float32(1 / n)
        for value in (strategy.reduce("mean", row), mean, kept.read()):
            for result in strategy.local_results(value):
                assert (bits(result.numpy()) == nearest(total, dtype)).all()
        whole_value = np.concatenate(parts)
        assert (bits(strategy.gather(part, 0).numpy()) == bits(whole_value)).all()
        result = strategy.local_results(strategy.reduce("mean", part, axis=0))[0]
        total = wide(whole_value).sum(0) * np.float32(1 / len(whole_value))
        assert (bits(result.numpy()) == nearest(total, dtype)).all()


# --- training -------------------------------------------------------------------------------------

DIGITS = md.data.load("digits").train
STEPS = 12


def train_digits(name, dtype, variable_update="replicated", n=2, loss_scale=None):
    """Train on digits; return the losses, the weights and the replicas' checksums."""
    context.seed(5)
    strategy = md.Strategy(f"cpu*{n}", variable_update)
    opt = md.optim.Momentum(0.02, 0.9, loss_scale=loss_scale)
    losses = []
    with strategy:
        with strategy.scope():
            model = md.models.build(name, (8, 8, 1), 10)
        batches = [
            (DIGITS.images[i : i + 33], DIGITS.labels[i : i + 33]) for i in range(0, 33 * STEPS, 33)
        ]
        for images, labels in strategy.distribute_dataset(batches):
            results = strategy.run(train.train_step, model, opt, images, labels, dtype=dtype)
            losses.append(train.mean_loss(strategy.local_results(results)))
        accuracy = train.evaluate(strategy, model, batches, dtype=dtype)
        weights = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
        assert weights.dtype == F32
        return losses, weights, train.weights_checksums(strategy, model), accuracy.top_1


@pytest.fixture(scope="module")
def in_float32():
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = train_digits(name, None)
        return cache[name]

    return get


@both
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_a_model_learns_as_in_float32(name, dtype, in_float32):
    loss_scale = 128.0 if dtype == "float16" else None
    losses, weights, sums, top_1 = train_digits(name, dtype, loss_scale=loss_scale)
    wide_losses, wide_weights, _, wide_top_1 = in_float32(name)
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(losses, wide_losses, atol=40 * EPSILON[dtype])
    drift = np.linalg.norm(weights - wide_weights) / np.linalg.norm(wide_weights)
    assert drift < 16 * EPSILON[dtype]
    assert abs(top_1 - wide_top_1) < 0.1
    assert len(set(sums)) == 1
    assert (weights != wide_weights).any()


@both
def test_all_policies_give_the_same_bits(dtype):
    runs = [
        train_digits("lenet", dtype, policy, n, loss_scale=128.0)
        for policy, n in (("replicated", 3), ("parameter_server", 3))
    ]
    assert {checksum for run in runs for checksum in run[2]} == {runs[0][2][0]}
    assert runs[0][0] == runs[1][0]


@pytest.mark.parametrize(("scale", "moved"), [(None, 0), (1024.0, -(2.0**-30))])
def test_a_loss_scale_brings_back_what_float16_loses(scale, moved):
    """2⁻³⁰ is zero in float16, and 2⁻²⁰ is not."""
    variable = md.Variable([0.0], name="w")
    opt = md.optim.SGD(1.0, loss_scale=scale)

    def loss():
        return ops.cast(ops.cast(variable, "float16"), "float32") * 2.0**-30

    md.get_strategy().run(opt.minimize, loss, [variable])
    assert variable.numpy().tolist() == [moved]


def test_an_automatic_loss_scale_comes_down_to_what_float16_can_hold():
    scale = md.optim.LossScale(2.0**18, automatic=True)
    losses, weights, *_ = train_digits("lenet", "float16", loss_scale=scale)
    assert 2.0**8 <= scale.value < 2.0**18
    assert np.isfinite(weights).all() and losses[-1] < losses[0] * 0.8
