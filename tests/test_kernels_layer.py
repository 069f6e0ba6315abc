"""Layer kernels against NumPy, Random123's known answers, and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels import layer, plain

SIZES = [0, 1, 15, 17, 1000003]
DTYPES = ["float32", "float64"]
KEY, COUNTER = (0xDEADBEEF, 42), (7, 0, 0xFFFFFFFF)


def normal(shape: Any, dtype: str, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# -- element by element ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_relu_and_its_derivative(dtype: str, size: int, threads: int) -> None:
    x, dy = normal(size, dtype), normal(size, dtype, 1)
    y, dx = np.full_like(x, 7), np.full_like(x, 7)
    layer.relu(x, y, threads=threads)
    layer.relu_backward(dy, y, dx, threads=threads)
    np.testing.assert_array_equal(y, plain.relu(x))
    np.testing.assert_array_equal(dx, plain.relu_backward(dy, y))
    layer.relu(x, x, threads=threads)
    layer.relu_backward(dy, x, dy, threads=threads)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(dy, dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_relu6_and_its_derivative(dtype: str, threads: int) -> None:
    x, dy = 6 * normal(20001, dtype), normal(20001, dtype, 1)
    x[:5] = np.nan, np.inf, -np.inf, 0, 6
    y, dx = np.full_like(x, 7), np.full_like(x, 7)
    layer.relu6(x, y, threads=threads)
    layer.relu6_backward(dy, y, dx, threads=threads)
    np.testing.assert_array_equal(y, plain.relu6(x))
    np.testing.assert_array_equal(dx, plain.relu6_backward(dy, y))
    np.testing.assert_array_equal(y[:5], [np.nan, 6, 0, 0, 6])
    np.testing.assert_array_equal(dx[:5], np.zeros(5))


def test_relu_lets_nan_through() -> None:
    y = np.zeros(3)
    layer.relu(np.array([np.nan, -np.inf, np.inf]), y)
    np.testing.assert_array_equal(y, [np.nan, 0, np.inf])


def test_alignment_does_not_matter() -> None:
    x, y = normal(1001, "float32")[1:], np.zeros(1002, np.float32)[2:]
    layer.relu(x, y)
    np.testing.assert_array_equal(y, plain.relu(x))


# -- random numbers --------------------------------------------------------------------------

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123's kat_vectors for philox4x32-10: key, counter, words
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, ...]
) -> None:
    assert layer.philox(key, counter) == words
    assert tuple(plain.philox(key, counter).tolist()) == words


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_uniform_equals_its_twin(dtype: str, size: int, threads: int) -> None:
    out = np.full(size, 7, dtype)
    layer.uniform(out, KEY, COUNTER, threads=threads)
    want = plain.uniform(size, dtype, KEY, COUNTER)
    assert want.dtype == dtype
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_is_uniform(dtype: str) -> None:
    out = np.empty(1 << 20, dtype)
    layer.uniform(out, KEY, COUNTER)
    assert 0 <= out.min() < 1e-5
    assert 1 - 1e-5 < out.max() < 1
    # Four standard deviations of the mean, of the variance and of each bin's count.
    n = out.size
    assert abs(out.mean() - 1 / 2) < 4 * (1 / 12 / n) ** 0.5
    assert abs(out.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    counts = np.histogram(out, 16, (0, 1))[0]
    assert abs(counts - n / 16).max() < 4 * (n / 16) ** 0.5


def test_a_longer_array_has_the_same_beginning() -> None:
    short, long = np.empty(5), np.empty(5000)
    layer.uniform(short, KEY, COUNTER)
    layer.uniform(long, KEY, COUNTER)
    np.testing.assert_array_equal(short, long[:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("threads", [1, 3])
def test_dropout_equals_its_twin(dtype: str, size: int, rate: float, threads: int) -> None:
    x = normal(size, dtype)
    y = np.full_like(x, 7)
    layer.dropout(x, y, rate, KEY, COUNTER, threads=threads)
    np.testing.assert_array_equal(y, plain.dropout(x, rate, KEY, COUNTER))
    if rate == 0:
        np.testing.assert_array_equal(y, x)
    layer.dropout(x, x, rate, KEY, COUNTER, threads=threads)
    np.testing.assert_array_equal(x, y)


def test_dropout_keeps_the_mean_and_drops_the_same_in_either_dtype() -> None:
    single, double = np.ones(1 << 20, np.float32), np.ones(1 << 20)
    layer.dropout(single, single, 0.25, KEY, COUNTER)
    layer.dropout(double, double, 0.25, KEY, COUNTER)
    assert set(double.tolist()) == {0.0, 1 / 0.75}
    np.testing.assert_array_equal(single == 0, double == 0)
    assert abs(double.mean() - 1) < 4 * (1 / 3 / double.size) ** 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: layer.dropout(x, x, 1.0, KEY, COUNTER), "rate must be .* below 1, got 1.0"),
        (lambda x: layer.dropout(x, x, np.nan, KEY, COUNTER), "rate must be .*, got nan"),
        (lambda x: layer.uniform(x, (1,), COUNTER), r"key must be 2 words .* got \(1,\)"),
        (lambda x: layer.uniform(x, KEY, (1, 2, 2**32)), "counter must be 3 words of 32 bits"),
        (lambda x: layer.dropout(x, x, 0.5, (-1, 0), COUNTER), "key must be 2 words of 32 bits"),
        (lambda x: layer.philox(KEY, COUNTER), "counter must be 4 words of 32 bits"),
    ],
)
def test_errors_of_random_numbers(call: Callable[[np.ndarray], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(np.ones(4))


# -- softmax cross-entropy -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 10), (1, 1), (7, 10), (64, 1001), (20000, 17)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_softmax_cross_entropy(dtype: str, shape: tuple[int, int], threads: int) -> None:
    logits = 10 * normal(shape, dtype)
    labels = np.random.default_rng(1).integers(0, shape[1], shape[0])
    losses, dlogits = np.full(shape[0], 7, dtype), np.full(shape, 7, dtype)
    layer.softmax_cross_entropy(logits, labels, losses, dlogits, threads=threads)
    want, dwant = plain.softmax_cross_entropy(logits.astype("float64"), labels)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(losses, want, rtol=32 * eps, atol=32 * eps)
    np.testing.assert_allclose(dlogits, dwant, rtol=64 * eps, atol=4 * eps)
    layer.softmax_cross_entropy(logits, labels, losses, logits)
    np.testing.assert_array_equal(logits, dlogits)


def test_equal_logits_cost_the_logarithm_of_their_number() -> None:
    losses, dlogits = np.empty(2), np.empty((2, 4))
    layer.softmax_cross_entropy(np.full((2, 4), 1e300), np.array([0, 3]), losses, dlogits)
    np.testing.assert_allclose(losses, np.log(4), rtol=1e-15)
    np.testing.assert_array_equal(dlogits[1], [0.25, 0.25, 0.25, -0.75])


@pytest.mark.parametrize(("dtype", "lowest"), [("float32", -87.0), ("float64", -708.0)])
def test_the_exponential_is_exact_to_two_units_in_the_last_place(dtype: str, lowest: float) -> None:
    # Against a logit of 0, the softmax of x is e^x / (1 + e^x): nearly e^x where x is small.
    x = np.linspace(lowest, -40, 200001).astype(dtype)
    logits = np.stack([x, np.zeros_like(x)], axis=1)
    losses, dlogits = np.empty_like(x), np.empty_like(logits)
    layer.softmax_cross_entropy(logits, np.ones(len(x), np.int64), losses, dlogits)
    want = np.exp(x.astype(np.longdouble))
    error = np.abs(dlogits[:, 0] - want) / np.spacing(want.astype(dtype))
    assert error.max() < 2
    layer.softmax_cross_entropy(logits - 1000, np.ones(len(x), np.int64), losses, dlogits)
    assert np.isfinite(dlogits).all()


def test_far_below_the_largest_is_nothing() -> None:
    losses, dlogits = np.empty(1, np.float32), np.empty((1, 3), np.float32)
    logits = np.array([[0, -200, -np.inf]], np.float32)
    layer.softmax_cross_entropy(logits, np.array([1]), losses, dlogits)
    assert losses[0] == 200
    assert dlogits.tolist() == [[1, -1, 0]]


@pytest.mark.parametrize("logits", [[np.nan, 1, 2], [1, 2, np.nan], [np.inf, 1, 2]])
def test_a_broken_logit_is_seen_in_the_loss(logits: list[float]) -> None:
    losses, dlogits = np.empty(1), np.empty((1, 3))
    layer.softmax_cross_entropy(np.array([logits]), np.array([1]), losses, dlogits)
    assert np.isnan(losses[0])


@pytest.mark.parametrize("label", [-1, 3])
def test_a_wrong_label_is_named(label: int) -> None:
    labels = np.array([0, 2, label, 1])
    words = f"label {label} at position 2 is none of the 3 classes 0 to 2"
    with pytest.raises(ValueError, match=words):
        layer.softmax_cross_entropy(np.zeros((4, 3)), labels, np.empty(4), np.empty((4, 3)))


def test_labels_are_int64() -> None:
    with pytest.raises(TypeError, match="labels must be a NumPy array of int64, got int32"):
        layer.softmax_cross_entropy(
            np.zeros((1, 3)), np.zeros(1, np.int32), np.empty(1), np.empty((1, 3))
        )


# -- windows ---------------------------------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], plain.Windows]:
    """Images [n, h, w, c] and windows that all reach into them."""
    shape = tuple(draw(st.integers(low, high)) for low, high in [(0, 3), (1, 9), (1, 9), (1, 18)])
    size, strides, before, output = [], [], [], []
    for length in shape[1:3]:
        k, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        pad = draw(st.integers(0, k - 1))
        size.append(k)
        strides.append(stride)
        before.append(pad)
        output.append(draw(st.integers(1, (length - 1 + pad) // stride + 1)))
    return shape, plain.Windows(*((a, b) for a, b in (output, size, strides, before)))


def position(windows: plain.Windows) -> tuple[int, ...]:
    return (*windows.size, *windows.strides, *windows.before)


def pooled(windows: plain.Windows, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *windows.output, shape[3])


def over_geometries(test: Callable[..., None]) -> Callable[..., None]:
    cases = given(geometries(), st.sampled_from(DTYPES), st.sampled_from([1, 2, 3]))
    return settings(max_examples=60, deadline=None)(cases(test))


@over_geometries
def test_im2col_and_col2im_equal_their_twins(geometry: Any, dtype: str, threads: int) -> None:
    shape, windows = geometry
    x = normal(shape, dtype)
    want = plain.im2col(x, windows)
    columns, dx = np.full(want.shape, np.nan, dtype), np.full_like(x, np.nan)
    layer.im2col(x, columns, *position(windows), threads=threads)
    np.testing.assert_array_equal(columns, want)
    columns = normal(want.shape, dtype, 1)
    layer.col2im(columns, dx, *position(windows), threads=threads)
    np.testing.assert_array_equal(dx, plain.col2im(columns, shape, windows))


@over_geometries
def test_max_pool_equals_its_twin(geometry: Any, dtype: str, threads: int) -> None:
    shape, windows = geometry
    # Few values, so that there are ties; and the two that are hard to compare.
    x = np.random.default_rng(0).choice([-np.inf, -1, 0, 1, np.nan], shape).astype(dtype)
    want, argwant = plain.max_pool(x, windows)
    y, argmax = np.full(want.shape, 7, dtype), np.full(want.shape, -1, np.int32)
    layer.max_pool(x, y, argmax, *position(windows), threads=threads)
    np.testing.assert_array_equal(argmax, argwant)
    np.testing.assert_array_equal(y, want)

    dy, dx = normal(want.shape, dtype, 1), np.full_like(x, np.nan)
    layer.max_pool_backward(dy, argmax, dx, *position(windows), threads=threads)
    np.testing.assert_array_equal(dx, plain.max_pool_backward(dy, argmax, shape, windows))


@over_geometries
def test_average_pool_equals_its_twin(geometry: Any, dtype: str, threads: int) -> None:
    shape, windows = geometry
    x = normal(shape, dtype)
    y = np.full(pooled(windows, shape), np.nan, dtype)
    layer.average_pool(x, y, *position(windows), threads=threads)
    np.testing.assert_array_equal(y, plain.average_pool(x, windows))

    dy, dx = normal(y.shape, dtype, 1), np.full_like(x, np.nan)
    layer.average_pool_backward(dy, dx, *position(windows), threads=threads)
    np.testing.assert_array_equal(dx, plain.average_pool_backward(dy, shape, windows))


@over_geometries
def test_backward_is_the_transpose_of_forward(geometry: Any, dtype: str, threads: int) -> None:
    # <forward(x), dy> = <x, backward(dy)> for the linear ones.
    shape, windows = geometry
    x = normal(shape, dtype)
    y = np.empty(pooled(windows, shape), dtype)
    layer.average_pool(x, y, *position(windows), threads=threads)
    dy, dx = normal(y.shape, dtype, 1), np.empty_like(x)
    layer.average_pool_backward(dy, dx, *position(windows), threads=threads)
    bound = 100 * np.finfo(dtype).eps * max(1, x.size) ** 0.5
    assert abs(np.vdot(y, dy) - np.vdot(x, dx)) <= bound * max(1, np.linalg.norm(x))

    columns = np.empty((*y.shape[:3], windows.size[0] * windows.size[1] * shape[3]), dtype)
    layer.im2col(x, columns, *position(windows), threads=threads)
    dcolumns = normal(columns.shape, dtype, 2)
    layer.col2im(dcolumns, dx, *position(windows), threads=threads)
    bound = 100 * np.finfo(dtype).eps * max(1, columns.size) ** 0.5
    assert abs(np.vdot(columns, dcolumns) - np.vdot(x, dx)) <= bound * max(1, np.linalg.norm(x))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_images_equal_the_twins_for_any_threads(threads: int) -> None:
    windows = plain.Windows(output=(33, 31), size=(3, 3), strides=(1, 1), before=(1, 1))
    where, x = position(windows), normal((8, 33, 31, 16), "float32")
    columns, dx, y = np.empty((8, 33, 31, 144), np.float32), np.empty_like(x), np.empty_like(x)
    argmax = np.empty(x.shape, np.int32)
    layer.im2col(x, columns, *where, threads=threads)
    np.testing.assert_array_equal(columns, plain.im2col(x, windows))
    layer.col2im(columns, dx, *where, threads=threads)
    np.testing.assert_array_equal(dx, plain.col2im(columns, x.shape, windows))
    layer.max_pool(x, y, argmax, *where, threads=threads)
    np.testing.assert_array_equal(y, plain.max_pool(x, windows)[0])
    layer.max_pool_backward(y, argmax, dx, *where, threads=threads)
    np.testing.assert_array_equal(dx, plain.max_pool_backward(y, argmax, x.shape, windows))
    layer.average_pool(x, y, *where, threads=threads)
    np.testing.assert_array_equal(y, plain.average_pool(x, windows))
    layer.average_pool_backward(y, dx, *where, threads=threads)
    np.testing.assert_array_equal(dx, plain.average_pool_backward(y, x.shape, windows))


def test_col2im_counts_the_windows_over_each_element() -> None:
    x, columns = np.ones((1, 4, 5, 2)), np.empty((1, 4, 5, 18))
    dx = np.empty_like(x)
    layer.im2col(x, columns, 3, 3, 1, 1, 1, 1)
    layer.col2im(columns, dx, 3, 3, 1, 1, 1, 1)
    want = np.outer([2, 3, 3, 2], [2, 3, 3, 3, 2])
    np.testing.assert_array_equal(dx[0, :, :, 0], want)
    np.testing.assert_array_equal(dx[0, :, :, 1], want)


def test_pools_by_hand() -> None:
    x = np.array([[1, 5, 2], [5, 3, 4], [0, 9, 8.0]]).reshape(1, 3, 3, 1)
    y, argmax = np.empty((1, 2, 2, 1)), np.empty((1, 2, 2, 1), np.int32)
    layer.max_pool(x, y, argmax, 2, 2, 2, 2, 0, 0)
    assert y.ravel().tolist() == [5, 4, 9, 8]
    assert argmax.ravel().tolist() == [1, 2, 1, 0]
    layer.average_pool(x, y, 2, 2, 2, 2, 0, 0)
    assert y.ravel().tolist() == [14 / 4, 6 / 2, 9 / 2, 8]


@pytest.mark.parametrize(
    ("output", "args", "words"),
    [
        ((4, 2), (2, 2, 1, 1, 0, 0), "lie wholly outside of images of 3x3"),
        ((2, 2), (2, 2, 1, 1, 2, 0), "lie wholly outside of images of 3x3"),
        ((2, 2), (2, 2, 1, 1, -1, 0), "lie wholly outside of images of 3x3"),
        ((2, 2), (0, 2, 1, 1, 0, 0), "window 0x2 and strides 1x1 must be positive"),
        ((2, 2), (2, 2, 1, 0, 0, 0), "window 2x2 and strides 1x0 must be positive"),
    ],
)
def test_windows_reach_into_the_image(
    output: tuple[int, int], args: tuple[int, ...], words: str
) -> None:
    x, y = np.ones((1, 3, 3, 1)), np.ones((1, *output, 1))
    with pytest.raises(ValueError, match=words):
        layer.average_pool(x, y, *args)
    with pytest.raises(ValueError, match=words):
        layer.average_pool_backward(y, x, *args)


def test_errors_of_windows_name_the_array() -> None:
    x, y = np.ones((1, 4, 4, 2)), np.ones((1, 2, 2, 2))
    with pytest.raises(TypeError, match="argmax must be a NumPy array of int32, got int64"):
        layer.max_pool(x, y, np.ones(y.shape, np.int64), 2, 2, 2, 2, 0, 0)
    with pytest.raises(ValueError, match=r"columns must have 32 elements, got .* \(1, 2, 2, 2\)"):
        layer.im2col(x, y, 2, 2, 2, 2, 0, 0)
    with pytest.raises(ValueError, match=r"needs images \[n, h, w, c\] and y"):
        layer.average_pool(x, y[0], 2, 2, 2, 2, 0, 0)
