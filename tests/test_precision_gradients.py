"""Gradients in float16 and bfloat16: computed in float32, rounded once, near the true ones."""

from __future__ import annotations

import numpy as np
import pytest
from narrow import DTYPES, EPSILON, bits, gradients, nearest, normal, whole, wide

from minidist import ops
from minidist.kernels import plain

both = pytest.mark.parametrize("dtype", DTYPES)


@both
def test_a_product_over_a_broadcast_axis_is_summed_in_float32(dtype):
    a, b, dy = whole((50, 4), dtype, 1), whole((4,), dtype, 2), whole((50, 4), dtype, 3)
    _, (da, db) = gradients(ops.multiply, a, b, dy=dy)
    assert (bits(da) == nearest(wide(dy) * wide(b), dtype)).all()
    assert (bits(db) == nearest((wide(dy) * wide(a)).sum(0), dtype)).all()


@both
def test_gradients_that_take_several_steps_are_rounded_once(dtype):
    x, dy = np.abs(normal((60,), dtype, 1)) + DTYPES[dtype].type(1), normal((60,), dtype, 2)
    a, g = wide(x), wide(dy)
    root = wide(ops.sqrt(ops.constant(x)).numpy())
    for operation, expected in (
        (ops.square, g * (a + a)),
        (lambda x: x**3.0, g * (a**2.0 * 3)),
        (ops.sqrt, g / (root + root)),
        (ops.log, g / a),
    ):
        _, (dx,) = gradients(operation, x, dy=dy)
        assert (bits(dx) == nearest(expected, dtype)).all()
    y, (da, db) = gradients(ops.divide, dy, x)
    assert (bits(da) == nearest(1 / a, dtype)).all()
    assert (bits(db) == nearest(-(1 / a * wide(y.numpy())), dtype)).all()


def soft(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


FUNCTIONS = {  # name: the operation, the same in float64 NumPy, shapes of the inputs
    "matmul": (ops.matmul, np.matmul, [(3, 5), (5, 2)]),
    "dense": (ops.dense, lambda x, w, b: x @ w + b, [(3, 5), (5, 2), (2,)]),
    "bias_add": (ops.bias_add, np.add, [(3, 5), (5,)]),
    "divide": (ops.divide, np.divide, [(3, 4), (4,)]),
    "exp": (ops.exp, np.exp, [(6,)]),
    "relu": (ops.relu, lambda x: np.maximum(x, 0), [(9,)]),
    "relu6": (lambda x: ops.relu6(x + 6.0), lambda x: np.clip(x + 6, 0, 6), [(9,)]),
    "concat": (lambda *x: ops.concat(x), lambda *x: np.concatenate(x, 1), [(3, 2), (3, 4)]),
    "depthwise": (
        lambda x, w: ops.depthwise_conv2d(x, w, padding="VALID"),
        lambda x, w: (x * w).sum((1, 2), keepdims=True),
        [(2, 2, 2, 3), (2, 2, 3)],
    ),
    "softmax": (ops.softmax, soft, [(3, 5)]),
    "log_softmax": (ops.log_softmax, lambda x: np.log(soft(x)), [(3, 5)]),
    "gelu": (ops.gelu, plain.gelu, [(9,)]),
    "layer_norm": (
        lambda x: ops.layer_norm(x, np.float32([1, 2, -1]), np.zeros(3, np.float32)),
        lambda x: plain.layer_norm(x, np.array([1, 2, -1]), np.zeros(3), 1e-5),
        [(2, 3)],
    ),
    "causal_attention": (
        lambda x: ops.causal_attention(x, 2),
        lambda x: plain.causal_attention(x, 2),
        [(1, 3, 12)],
    ),
    "mean": (lambda x: ops.reduce_mean(x, 0), lambda x: x.mean(0), [(7, 2)]),
    "l2_loss": (ops.l2_loss, lambda x: (x * x).sum() / 2, [(3, 2)]),
}


@both
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_against_finite_differences(name, dtype):
    operation, oracle, shapes = FUNCTIONS[name]
    inputs = [normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    exact = [np.where(np.abs(x) < 0.1, 0.5, wide(x)).astype(np.float64) for x in inputs]
    inputs = [x.astype(DTYPES[dtype]) for x in exact]
    y, found = gradients(lambda *x: ops.cast(operation(*x), "float32"), *inputs)
    close = {"rtol": 4 * EPSILON[dtype], "atol": 4 * EPSILON[dtype]}
    np.testing.assert_allclose(y.numpy(), oracle(*exact), **close)
    for i, gradient in enumerate(found):
        assert gradient.dtype == DTYPES[dtype]
        for index in np.ndindex(exact[i].shape):
            step = np.zeros_like(exact[i])
            step[index] = 1e-6
            ends = [
                oracle(*[x + sign * step if k == i else x for k, x in enumerate(exact)]).sum()
                for sign in (1, -1)
            ]
            slope = (ends[0] - ends[1]) / 2e-6
            np.testing.assert_allclose(float(gradient[index]), slope, **close)


@both
def test_losses_are_float32(dtype):
    logits, labels = normal((6, 5), dtype, 1), np.array([0, 4, 2, 2, 1, 3])
    losses, (dlogits,) = gradients(lambda x: ops.softmax_cross_entropy(x, labels), logits)
    chances = soft(wide(logits))
    assert losses.dtype == np.float32 and dlogits.dtype == DTYPES[dtype]
    np.testing.assert_allclose(losses.numpy(), -np.log(chances[range(6), labels]), rtol=1e-5)
    wanted = wide(nearest(chances - np.eye(5)[labels], dtype).astype(np.uint16).view(DTYPES[dtype]))
    np.testing.assert_allclose(wide(dlogits.numpy()), wanted, rtol=EPSILON[dtype])
    loss, (dw,) = gradients(ops.l2_loss, np.full(3, 300, DTYPES[dtype]))
    assert float(loss) == 135_000 and loss.dtype == np.float32 and (wide(dw.numpy()) == 300).all()


@both
def test_batch_normalisation_keeps_its_moments_in_float32(dtype):
    x, dy = normal((40, 3), dtype, 1), normal((40, 3), dtype, 2)
    scale, offset = np.float32([1.1, 0.7, -2]), np.float32([0.3, 0, 1])
    moments = []

    def normalised(x, scale, offset):
        y, *moments[:] = ops.batch_norm(x, scale, offset)
        return y

    y, (dx, dscale, doffset) = gradients(normalised, x, scale, offset, dy=dy)
    assert y.dtype == dx.dtype == DTYPES[dtype]
    assert {t.dtype for t in (dscale, doffset, *moments)} == {np.dtype(np.float32)}
    a, g = wide(x).astype(np.float64), wide(dy).astype(np.float64)
    sigma = np.sqrt(a.var(0) + 1e-5)
    normal_x = (a - a.mean(0)) / sigma
    np.testing.assert_allclose(moments[0].numpy(), a.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moments[1].numpy(), a.var(0), rtol=1e-5)
    np.testing.assert_allclose(doffset.numpy(), g.sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dscale.numpy(), (g * normal_x).sum(0), rtol=1e-4, atol=1e-5)
    close = {"rtol": EPSILON[dtype], "atol": EPSILON[dtype] / 8}
    np.testing.assert_allclose(wide(y.numpy()), normal_x * scale + offset, **close)
    expected = scale / sigma * (g - g.mean(0) - normal_x * (g * normal_x).mean(0))
    np.testing.assert_allclose(wide(dx.numpy()), expected, **close)
    for moment in (scale, ops.constant(scale, dtype)):
        still = ops.batch_norm_inference(x, scale, offset, moment * 0, moment * 0 + 1)
        assert still.dtype == DTYPES[dtype]


@both
def test_dropout_keeps_the_elements_that_float32_keeps(dtype):
    x = normal((30, 30), dtype, 1)
    words = ((1, 2), (3, 4, 5))
    expected = ops.dropout(wide(x), 0.3, *words).numpy()
    y, (dx,) = gradients(lambda x: ops.dropout(x, 0.3, *words), x)
    assert (bits(y) == nearest(expected, dtype)).all()
    assert (bits(dx) == nearest((expected != 0) / np.float32(0.7), dtype)).all()
