"""What operations compute, against plain formulas and loops; and what they say of bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import ops
from minidist.errors import ContextError, ShapeError, UsageError

quick = settings(deadline=None, max_examples=20)


def normal(shape: tuple[int, ...], seed: int = 0, dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def padding_of(n: int, k: int, s: int, padding: str) -> tuple[int, int]:
    """(windows, padding before) as TensorFlow documents SAME and VALID."""
    if padding == "VALID":
        return math.ceil((n - k + 1) / s), 0
    total = max(k - s, 0) if n % s == 0 else max(k - n % s, 0)
    return math.ceil(n / s), total // 2


def windows_of(x: np.ndarray, size, strides, padding):
    """Yield (output row, output column, filter rows, filter columns, the part inside the image)."""
    (oh, top), (ow, left) = (
        padding_of(n, k, s, padding) for n, k, s in zip(x.shape[1:3], size, strides, strict=True)
    )
    for i in range(oh):
        for j in range(ow):
            rows = [r for r in range(size[0]) if 0 <= i * strides[0] + r - top < x.shape[1]]
            columns = [c for c in range(size[1]) if 0 <= j * strides[1] + c - left < x.shape[2]]
            y, z = i * strides[0] + rows[0] - top, j * strides[1] + columns[0] - left
            yield i, j, rows, columns, x[:, y : y + len(rows), z : z + len(columns)]


geometry = st.tuples(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["SAME", "VALID"]),
    st.integers(0, 3),
    st.integers(0, 3),
)


@quick
@given(geometry, st.integers(0, 2), st.integers(1, 3), st.integers(1, 3))
def test_conv2d_is_the_sum_over_each_window(where, n, channels, filters):
    size, strides, padding, extra, more = where
    x, w = (
        normal((n, size[0] + extra, size[1] + more, channels)),
        normal((*size, channels, filters)),
    )
    y = ops.conv2d(ops.constant(x), ops.constant(w), strides, padding).numpy()
    seen = 0
    for i, j, rows, columns, part in windows_of(x, size, strides, padding):
        expected = np.einsum("nrqc,rqck->nk", part, w[np.ix_(rows, columns)])
        np.testing.assert_allclose(y[:, i, j], expected, rtol=1e-12, atol=1e-12)
        seen += 1
    assert seen == y.shape[1] * y.shape[2]


@quick
@given(geometry, st.integers(0, 2), st.integers(1, 3))
def test_pooling_takes_the_greatest_and_the_mean_of_real_elements(where, n, channels):
    size, strides, padding, extra, more = where
    x = normal((n, size[0] + extra, size[1] + more, channels)) - 3
    greatest = ops.max_pool(ops.constant(x), size, strides, padding).numpy()
    mean = ops.average_pool(ops.constant(x), size, strides, padding).numpy()
    for i, j, _, _, part in windows_of(x, size, strides, padding):
        np.testing.assert_array_equal(greatest[:, i, j], part.max((1, 2)))
        np.testing.assert_allclose(mean[:, i, j], part.mean((1, 2)), rtol=1e-12)


def test_explicit_padding_is_the_same_as_zeros_around():
    x, w = normal((2, 5, 4, 3)), normal((3, 3, 3, 2))
    around = np.pad(x, ((0, 0), (1, 2), (0, 1), (0, 0)))
    y = ops.conv2d(ops.constant(x), ops.constant(w), 2, ((1, 2), (0, 1)))
    z = ops.conv2d(ops.constant(around), ops.constant(w), 2, "VALID")
    np.testing.assert_array_equal(y, z)


def test_a_1x1_convolution_is_a_matrix_product():
    x, w = normal((2, 3, 4, 5)), normal((1, 1, 5, 6))
    np.testing.assert_allclose(ops.conv2d(x, w), x @ w[0, 0], rtol=1e-12)


def test_max_pool_gives_the_gradient_to_the_first_of_equals():
    x = ops.constant(np.ones((1, 2, 2, 1)))
    with md.GradientTape() as tape:
        tape.watch(x)
        y = ops.max_pool(x, 2)
    assert tape.gradient(y, x).numpy().ravel().tolist() == [1, 0, 0, 0]


@quick
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
def test_batch_norm_normalises_all_axes_but_the_last(shape):
    x, scale, offset = normal(shape), normal(shape[-1:], 1), normal(shape[-1:], 2)
    axes = tuple(range(len(shape) - 1))
    y, mean, variance = ops.batch_norm(x, scale, offset, 1e-3)
    np.testing.assert_allclose(mean, x.mean(axes), atol=1e-12)
    np.testing.assert_allclose(variance, x.var(axes), atol=1e-12)
    expected = (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-3) * scale + offset
    np.testing.assert_allclose(y, expected, atol=1e-12)
    again = ops.batch_norm_inference(x, scale, offset, mean, variance, 1e-3)
    np.testing.assert_allclose(again, expected, atol=1e-12)


def test_float32_sums_over_many_rows_stay_accurate():
    x = normal((50_001, 3), dtype="float32") + np.float32(10)
    exact = x.astype("float64").sum(0)
    np.testing.assert_allclose(ops.reduce_sum(x, 0), exact, rtol=1e-6)
    _, mean, variance = ops.batch_norm(x, np.ones(3, "float32"), np.zeros(3, "float32"))
    np.testing.assert_allclose(mean, x.astype("float64").mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, x.astype("float64").var(0), rtol=1e-5)


@quick
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1.0, 1000.0]))
def test_softmax_and_cross_entropy(n, k, size):
    x, labels = normal((n, k)) * size, np.random.default_rng(1).integers(0, k, n)
    shifted = np.exp(x - x.max(1, keepdims=True))
    probabilities = shifted / shifted.sum(1, keepdims=True)
    logs = x - x.max(1, keepdims=True) - np.log(shifted.sum(1, keepdims=True))
    np.testing.assert_allclose(ops.softmax(x), probabilities, rtol=1e-12)
    np.testing.assert_allclose(ops.log_softmax(x), logs, rtol=1e-12, atol=1e-12)
    losses = ops.softmax_cross_entropy(x, labels.astype("int32"))
    np.testing.assert_allclose(losses, -logs[np.arange(n), labels], rtol=1e-12, atol=1e-12)
    smooth = 0.75 * np.eye(k)[labels] + 0.25 / k
    np.testing.assert_allclose(
        ops.softmax_cross_entropy(x, labels, 0.25), -(smooth * logs).sum(1), rtol=1e-12, atol=1e-12
    )


def test_dropout_keeps_the_mean_and_repeats_with_the_same_words():
    x = np.ones((100, 100), "float32")
    y = ops.dropout(x, 0.25, (1, 2), (3, 4, 5)).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 0.02
    np.testing.assert_array_equal(y, ops.dropout(x, 0.25, (1, 2), (3, 4, 5)))
    assert (y != ops.dropout(x, 0.25, (1, 2), (4, 4, 5)).numpy()).any()


def test_reductions_over_axes():
    x = normal((2, 3, 4))
    for axis in (None, 0, 1, -1, (0, 1), (0, 2), (2, 1, 0), ()):
        for keepdims in (False, True):
            np.testing.assert_allclose(
                ops.reduce_sum(x, axis, keepdims), x.sum(axis, keepdims=keepdims), rtol=1e-12
            )
            np.testing.assert_allclose(
                ops.reduce_mean(x, axis, keepdims), x.mean(axis, keepdims=keepdims), rtol=1e-12
            )
    assert ops.l2_loss(x).item() == pytest.approx((x**2).sum() / 2)
    np.testing.assert_array_equal(ops.argmax(x, 1), x.argmax(1))
    assert ops.argmax(x).dtype == np.int64


def test_an_empty_batch_goes_through_everything():
    x = ops.constant(np.zeros((0, 4, 4, 3), "float32"))
    w = ops.constant(np.ones((3, 3, 3, 2), "float32"))
    scale = ops.constant(np.ones(2, "float32"))
    labels = ops.constant(np.zeros(0, "int64"))
    with md.GradientTape() as tape:
        for tensor in (w, scale):
            tape.watch(tensor)
        h, mean, variance = ops.batch_norm(ops.conv2d(x, w), scale, scale)
        h = ops.average_pool(ops.max_pool(ops.relu(h), 2), 2)
        h = ops.dropout(ops.reshape(h, (0, 2)), 0.5, (0, 0), (0, 0, 0))
        loss = ops.reduce_mean(ops.softmax_cross_entropy(h, labels))
    assert loss.item() == 0
    assert mean.numpy().tolist() == variance.numpy().tolist() == [0, 0]
    for gradient in tape.gradient(loss, [w, scale]):
        assert not gradient.numpy().any()


# -- what does not fit -----------------------------------------------------------------------

F = np.zeros


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (lambda: ops.add(F((2, 3)), F((4,))), ["add", "(2, 3)", "(4,)"]),
        (lambda: ops.multiply(F(2), F(2, "f")), ["multiply", "float64", "float32", "cast"]),
        (lambda: ops.constant(F(2, int)) + 0.5, ["add", "0.5", "int64"]),
        (lambda: ops.exp(F(2, int)), ["exp", "int64", "(2,)"]),
        (lambda: ops.matmul(F((2, 3)), F((4, 5))), ["matmul", "(2, 3)", "(4, 5)"]),
        (lambda: ops.matmul(F(3), F((3, 5))), ["matmul", "(3,)", "(3, 5)"]),
        (lambda: ops.dense(F((2, 3)), F((3, 5)), F(4)), ["dense", "(3, 5)", "(4,)"]),
        (lambda: ops.bias_add(F((2, 3)), F(2)), ["bias_add", "(2, 3)", "(2,)"]),
        (
            lambda: ops.conv2d(F((1, 4, 4, 3)), F((3, 3, 2, 5))),
            ["conv2d", "(1, 4, 4, 3)", "(3, 3, 2, 5)"],
        ),
        (lambda: ops.conv2d(F((4, 4, 3)), F((3, 3, 3, 5))), ["conv2d", "(4, 4, 3)"]),
        (
            lambda: ops.conv2d(F((1, 2, 4, 3)), F((3, 3, 3, 5)), 1, "VALID"),
            ["conv2d", "(3, 3)", "VALID", "(1, 2, 4, 3)"],
        ),
        (lambda: ops.max_pool(F((1, 4, 4, 3)), 5), ["max_pool", "(5, 5)", "(1, 4, 4, 3)"]),
        (
            lambda: ops.average_pool(F((1, 4, 4, 3)), 2, 1, ((2, 0), (0, 0))),
            ["average_pool", "outside", "(1, 4, 4, 3)"],
        ),
        (lambda: ops.max_pool(F((4, 4)), 2), ["max_pool", "(4, 4)"]),
        (lambda: ops.batch_norm(F((2, 3)), F(2), F(3)), ["batch_norm", "(2, 3)", "(2,)"]),
        (
            lambda: ops.batch_norm_inference(F((2, 3)), F(3), F(3), F(2), F(3)),
            ["batch_norm", "(2,)", "(3,)"],
        ),
        (lambda: ops.reduce_sum(F((2, 3)), 2), ["reduce_sum", "2", "(2, 3)"]),
        (lambda: ops.reduce_mean(F((2, 3)), (0, -2)), ["reduce_mean", "(0, -2)"]),
        (lambda: ops.argmax(F((2, 0))), ["argmax", "(2, 0)"]),
        (lambda: ops.reshape(F((2, 3)), (4, -1)), ["reshape", "(2, 3)", "(4, -1)"]),
        (lambda: ops.reshape(F((0, 3)), (0, -1)), ["reshape", "(0, 3)", "(0, -1)"]),
        (lambda: ops.transpose(F((2, 3)), (0, 0)), ["transpose", "(0, 0)", "(2, 3)"]),
        (lambda: ops.take(F((2, 3)), [0, 1]), ["(2, 3)", "list"]),
        (lambda: ops.softmax(F((2, 0))), ["softmax", "(2, 0)"]),
        (
            lambda: ops.softmax_cross_entropy(F((2, 3)), F(3, int)),
            ["softmax_cross_entropy", "(2, 3)", "(3,)"],
        ),
        (lambda: ops.softmax_cross_entropy(F((2, 3)), F(2)), ["softmax_cross_entropy", "float64"]),
        (lambda: ops.constant(["a"]), ["constant", "<U1"]),
    ],
)
def test_what_does_not_fit_is_named(operation, words):
    with pytest.raises(ShapeError) as caught:
        operation()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (lambda: ops.conv2d(F((1, 4, 4, 3)), F((3, 3, 3, 5)), 0), ["conv2d", "strides", "0"]),
        (
            lambda: ops.conv2d(F((1, 4, 4, 3)), F((3, 3, 3, 5)), 1, "FULL"),
            ["FULL", "SAME", "VALID"],
        ),
        (lambda: ops.max_pool(F((1, 4, 4, 3)), 2, 2, ((0, 0),)), ["max_pool", "top", "bottom"]),
        (lambda: ops.dropout(F(3), 1.0, (0, 0), (0, 0, 0)), ["dropout", "1.0"]),
        (
            lambda: ops.softmax_cross_entropy(F((2, 3)), F(2, int), 1.5),
            ["label_smoothing is 1.5", "from 0 to 1"],
        ),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(operation, words):
    with pytest.raises(UsageError) as caught:
        operation()
    for word in words:
        assert word in str(caught.value)


def test_a_label_outside_of_the_classes_is_a_value_error():
    with pytest.raises(ValueError, match="3"):
        ops.softmax_cross_entropy(F((1, 3)), np.array([3]))


def test_tensors_of_two_devices_do_not_meet():
    a = ops.constant([1.0])
    with md.device("cpu:1"):
        b = ops.constant([1.0])
        c = ops.constant(a)
    with pytest.raises(ContextError, match="cpu:0 and one on cpu:1"):
        a + b
    assert (b + c).numpy().tolist() == [2]
