"""Every operation's gradient against central differences in float64, over made-up shapes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import ops
from minidist.device import cpu_convolution
from minidist.tape import GradientTape
from minidist.tensor import Tensor

quick = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(0, 3)
shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def distinct(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values at least 0.1 apart and 0.05 from zero, so that no kink lies within a difference."""
    n = prod(shape)
    values = (np.arange(n) - n // 2) * 0.1 + 0.05
    return np.random.default_rng(seed).permutation(values).reshape(shape)


def check(operation: Callable[..., Tensor], *inputs: np.ndarray, step: float = 1e-5) -> None:
    """Compare the tape's gradients of Σ weight·operation(*inputs) with central differences."""
    inputs = tuple(np.asarray(x) for x in inputs)
    tensors = [ops.constant(x) for x in inputs]
    with GradientTape() as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = operation(*tensors)
        weights = normal(y.shape, 1)
        total = ops.reduce_sum(y * ops.constant(weights))
    gradients = tape.gradient(total, tensors)

    for i, x in enumerate(inputs):
        numeric = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            values = []
            for sign in (1, -1):
                moved = x.copy()
                moved[index] += sign * step
                args = [ops.constant(moved if k == i else other) for k, other in enumerate(inputs)]
                values.append(np.sum(weights * operation(*args).numpy()))
            numeric[index] = (values[0] - values[1]) / (2 * step)
        assert gradients[i].shape == x.shape
        assert gradients[i].dtype == x.dtype
        assert gradients[i].array.flags.c_contiguous
        np.testing.assert_allclose(gradients[i].numpy(), numeric, rtol=1e-6, atol=1e-7)


@st.composite
def broadcastable(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = draw(st.lists(st.integers(0, 3), max_size=3))
    pair = []
    for _ in range(2):
        kept = full[draw(st.integers(0, len(full))) :]
        pair.append(tuple(1 if draw(st.booleans()) else length for length in kept))
    return pair[0], pair[1]


@quick
@given(broadcastable(), st.sampled_from(["add", "subtract", "multiply", "divide"]), seeds)
def test_arithmetic_with_broadcasting(pair, name, seed):
    a, b = normal(pair[0], seed), normal(pair[1], seed + 1)
    check(getattr(ops, name), a, np.sign(b) * (np.abs(b) + 0.5))


@quick
@given(
    shapes,
    st.sampled_from(["negative", "exp", "log", "sqrt", "square", "softmax", "log_softmax", "gelu"]),
    seeds,
)
def test_functions_of_one_tensor(shape, name, seed):
    shape = shape or ((2,) if "softmax" in name else ())
    check(getattr(ops, name), np.abs(normal(shape, seed)) + 0.3)


@pytest.mark.parametrize("exponent", [-1, 0, 0.5, 1, 2, 3])
def test_power(exponent):
    check(lambda x: ops.power(x, exponent), np.abs(normal((2, 3), 0)) + 0.5)


def test_power_zero_is_flat_at_zero():
    x = ops.constant(np.zeros(2))
    with GradientTape() as tape:
        tape.watch(x)
        y = x**0
    assert tape.gradient(y, x).numpy().tolist() == [0, 0]


@quick
@given(shapes, seeds)
def test_relu(shape, seed):
    check(ops.relu, distinct(shape, seed))
    check(ops.relu6, 6 + distinct(shape, seed))


@quick
@given(shapes, seeds, st.floats(0, 0.9))
def test_dropout(shape, seed, rate):
    check(lambda x: ops.dropout(x, rate, (seed, 1), (0, 2, 3)), normal(shape, seed))


@quick
@given(lengths, lengths, lengths, seeds)
def test_matmul(n, k, m, seed):
    check(ops.matmul, normal((n, k), seed), normal((k, m), seed + 1))


@quick
@given(shapes, lengths, lengths, lengths, seeds)
def test_matmul_of_stacks(stack, n, k, m, seed):
    check(ops.matmul, normal((*stack, n, k), seed), normal((*stack, k, m), seed + 1))


@quick
@given(st.lists(st.integers(0, 3), max_size=2).map(tuple), st.integers(2, 4), seeds)
def test_layer_norm(shape, columns, seed):
    x = distinct((*shape, columns), seed) * 10  # two numbers that are nearly equal vary too fast
    check(ops.layer_norm, x, normal((columns,), seed + 1), normal((columns,), seed + 2))


@quick
@given(st.integers(0, 2), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), seeds)
def test_causal_attention(n, tokens, heads, size, seed):
    qkv = normal((n, tokens, 3 * heads * size), seed)
    check(lambda x: ops.causal_attention(x, heads), qkv)


@quick
@given(lengths, lengths, lengths, seeds)
def test_dense(n, k, m, seed):
    check(ops.dense, normal((n, k), seed), normal((k, m), seed + 1), normal((m,), seed + 2))


@quick
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), seeds)
def test_bias_add(shape, seed):
    check(ops.bias_add, normal(shape, seed), normal(shape[-1:], seed + 1))


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int], object]:
    """An image's height and width, and window sizes, strides and padding that fit it."""
    size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    strides = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    image = tuple(k + draw(st.integers(0, 2)) for k in size)
    pairs = [draw(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1))) for k in size]
    return image, size, strides, draw(st.sampled_from(["SAME", "VALID", tuple(pairs)]))


@quick
@given(windows(), st.integers(0, 2), st.integers(1, 2), st.integers(1, 2), seeds)
def test_conv2d(where, n, channels, filters, seed):
    image, size, strides, padding = where
    check(
        lambda x, w: ops.conv2d(x, w, strides, padding),
        normal((n, *image, channels), seed),
        normal((*size, channels, filters), seed + 1),
    )


@quick
@given(windows(), st.integers(0, 2), st.integers(1, 3), seeds)
def test_depthwise_conv2d(where, n, channels, seed):
    image, size, strides, padding = where
    check(
        lambda x, w: ops.depthwise_conv2d(x, w, strides, padding),
        normal((n, *image, channels), seed),
        normal((*size, channels), seed + 1),
    )


def test_conv2d_in_several_blocks(monkeypatch):
    monkeypatch.setattr(cpu_convolution, "_BLOCK_BYTES", 1000)
    check(ops.conv2d, normal((5, 4, 3, 1), 0), normal((2, 2, 1, 2), 1))


@quick
@given(windows(), st.integers(0, 2), st.integers(1, 2), seeds)
def test_max_pool(where, n, channels, seed):
    image, size, strides, padding = where
    check(lambda x: ops.max_pool(x, size, strides, padding), distinct((n, *image, channels), seed))


@quick
@given(windows(), st.integers(0, 2), st.integers(1, 2), seeds)
def test_average_pool(where, n, channels, seed):
    image, size, strides, padding = where
    check(
        lambda x: ops.average_pool(x, size, strides, padding), normal((n, *image, channels), seed)
    )


@quick
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), seeds)
def test_batch_norm(shape, seed):
    c = shape[-1:]
    check(
        # A larger epsilon keeps the curvature of nearly constant columns within the tolerance.
        lambda x, scale, offset: ops.batch_norm(x, scale, offset, 0.1)[0],
        normal(shape, seed),
        normal(c, seed + 1),
        normal(c, seed + 2),
    )


@quick
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), seeds)
def test_batch_norm_inference(shape, seed):
    c = shape[-1:]
    mean, variance = ops.constant(normal(c, seed)), ops.constant(np.abs(normal(c, seed + 1)))
    check(
        lambda x, scale, offset: ops.batch_norm_inference(x, scale, offset, mean, variance, 0.1),
        normal(shape, seed),
        normal(c, seed + 2),
        normal(c, seed + 3),
    )


@quick
@given(
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.data(),
    st.booleans(),
    st.sampled_from(["reduce_sum", "reduce_mean"]),
    seeds,
)
def test_reductions(shape, data, keepdims, name, seed):
    axis = data.draw(
        st.none() | st.sets(st.integers(0, len(shape) - 1)).map(tuple) if shape else st.none()
    )
    check(lambda x: getattr(ops, name)(x, axis, keepdims), normal(shape, seed))


@quick
@given(st.lists(st.integers(0, 3), max_size=3).map(tuple), seeds)
def test_l2_loss(shape, seed):
    check(ops.l2_loss, normal(shape, seed))


@quick
@given(st.lists(st.integers(0, 3), max_size=3).map(tuple), seeds, st.randoms())
def test_reshape_and_transpose(shape, seed, random):
    axes = list(range(len(shape)))
    random.shuffle(axes)
    check(lambda x: ops.transpose(ops.reshape(x, (1, *shape))[0], axes), normal(shape, seed))


@quick
@given(st.lists(lengths, max_size=2), st.lists(lengths, min_size=1, max_size=4), seeds)
def test_concat(shape, last, seed):
    parts = [normal((*shape, length), seed + i) for i, length in enumerate(last)]
    check(lambda *x: ops.concat(x), *parts)
    joined = ops.concat(parts)
    np.testing.assert_array_equal(joined, np.concatenate(parts, -1))


@pytest.mark.parametrize(
    "index", [0, -1, slice(1, 3), slice(None, None, -2), (slice(None), 1), (..., None, 2), None, ()]
)
def test_indexing(index):
    check(lambda x: x[index], normal((4, 3), 0))


@quick
@given(st.integers(0, 4), st.integers(1, 4), st.sampled_from([0, 0.1, 1]), seeds)
def test_softmax_cross_entropy(n, k, share, seed):
    labels = ops.constant(np.random.default_rng(seed).integers(0, k, n))
    check(lambda x: ops.softmax_cross_entropy(x, labels, share), normal((n, k), seed))


def test_cast_passes_the_gradient_in_the_other_dtype():
    x = ops.constant(np.array([1.0, 2.0]))
    with GradientTape() as tape:
        tape.watch(x)
        y = ops.square(ops.cast(x, "float32"))
    gradient = tape.gradient(y, x)
    assert gradient.dtype == np.float64
    assert gradient.numpy().tolist() == [2, 4]
