"""Kernels of tokens.pyx and attention.pyx against NumPy, and for any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels import attention, plain, tokens

EPSILON = 1e-3
DTYPES = ["float32", "float64"]
BOUND = {"float32": 2e-5, "float64": 1e-13}
every_type = pytest.mark.parametrize("dtype", DTYPES)


def normal(shape: Any, dtype: str, seed: int, mean: float = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) + mean, dtype)


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Within what rounding makes of the largest number."""
    size = max(1.0, float(np.abs(want).max(initial=0)))
    np.testing.assert_allclose(got, want, rtol=0, atol=BOUND[got.dtype.name] * size)


# -- GELU ------------------------------------------------------------------------------------


@every_type
def test_gelu_and_its_derivative(dtype: str) -> None:
    x, dy = 4 * normal((300, 70), dtype, 0), normal((300, 70), dtype, 1)
    y, dx = np.empty_like(x), np.empty_like(x)
    tokens.gelu(x, y)
    tokens.gelu_backward(dy, x, dx)
    exact, exact_dy = x.astype(np.float64), dy.astype(np.float64)
    close(y, plain.gelu(exact))
    close(dx, plain.gelu_backward(exact_dy, exact))


@every_type
def test_gelu_of_numbers_that_are_large_or_none(dtype: str) -> None:
    x = np.array([np.inf, 1e30, 20, -20, -1e30, np.nan], dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    tokens.gelu(x, y)
    tokens.gelu_backward(np.full_like(x, 2), x, dx)
    np.testing.assert_allclose(y, np.array([np.inf, 1e30, 20, 0, 0, np.nan], dtype), atol=1e-30)
    np.testing.assert_allclose(dx, np.array([2, 2, 2, 0, 0, np.nan], dtype), atol=1e-30)


# -- layer normalisation ---------------------------------------------------------------------


@every_type
@pytest.mark.parametrize(
    "shape", [(0, 3), (1, 1), (7, 3), (5, 17), (3, 9, 16), (600, 128), (40, 1000)]
)
def test_layer_norm_and_its_gradients(shape: tuple[int, ...], dtype: str) -> None:
    x, dy = normal(shape, dtype, 0, mean=2), normal(shape, dtype, 1)
    scale, offset = (normal(shape[-1], dtype, seed) for seed in (2, 3))
    y, dx, dscale, doffset = (np.full_like(each, 7) for each in (x, x, scale, scale))
    tokens.layer_norm(x, scale, offset, EPSILON, y)
    tokens.layer_norm_backward(dy, x, scale, EPSILON, dx, dscale, doffset)
    exact_dy, exact_x, *exact = (each.astype(np.float64) for each in (dy, x, scale, offset))
    close(y, plain.layer_norm(exact_x, *exact, EPSILON))
    wanted = plain.layer_norm_backward(exact_dy, exact_x, exact[0], EPSILON)
    for got, want in zip((dx, dscale, doffset), wanted, strict=True):
        close(got, want)
    tokens.layer_norm(x, scale, offset, EPSILON, x)
    np.testing.assert_array_equal(x, y)


def test_a_row_far_from_zero_has_its_variance() -> None:
    x = normal((50, 64), "float32", 0, mean=1e4)
    y, scale = np.empty_like(x), np.ones(64, np.float32)
    tokens.layer_norm(x, scale, 0 * scale, 0, y)
    wanted = plain.layer_norm(x.astype(np.float64), scale, 0 * scale, 0)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-3)  # x itself is known to 1e-3


@every_type
def test_sums_over_a_row_are_those_of_sixteen_lanes_in_their_order(dtype: str) -> None:
    def row_sum(row: np.ndarray) -> Any:
        lanes = [row.dtype.type(0)] * 16
        for i, each in enumerate(row):
            lanes[i % 16] += each
        total = row.dtype.type(0)
        for lane in lanes:
            total += lane
        return total

    x, (scale, offset) = normal((4, 75), dtype, 0, mean=3), normal((2, 75), dtype, 1)
    y, want, one = np.empty_like(x), np.empty_like(x), x.dtype.type(1)
    tokens.layer_norm(x, scale, offset, EPSILON, y)
    for row, wanted in zip(x, want, strict=True):
        mean = row_sum(row) / x.dtype.type(75)
        variance = row_sum((row - mean) * (row - mean)) / x.dtype.type(75)
        inverse = one / np.sqrt(variance + x.dtype.type(EPSILON))
        wanted[:] = (row - mean) * inverse * scale + offset
    np.testing.assert_array_equal(y, want)


# -- attention -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 3),
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_attention_and_its_gradient(
    n: int, length: int, heads: int, size: int, dtype: str, seed: int
) -> None:
    qkv = normal((n, length, 3 * heads * size), dtype, seed)
    dy = normal((n, length, heads * size), dtype, seed + 1)
    y, dqkv = np.full_like(dy, 7), np.full_like(qkv, 7)
    attention.causal_attention(qkv, y, heads)
    attention.causal_attention_backward(dy, qkv, dqkv, heads)
    exact = qkv.astype(np.float64)
    close(y, plain.causal_attention(exact, heads))
    wanted = plain.causal_attention_backward(dy.astype(np.float64), exact, heads)
    close(dqkv, wanted)


@every_type
def test_a_token_sees_nothing_behind_it(dtype: str) -> None:
    qkv = normal((2, 37, 3 * 2 * 5), dtype, 0)
    y, changed = np.empty((2, 2, 37, 10), dtype)
    attention.causal_attention(qkv, y, 2)
    qkv[:, 20:] *= -3
    attention.causal_attention(qkv, changed, 2)
    np.testing.assert_array_equal(y[:, :20], changed[:, :20])
    assert (y[:, 20:] != changed[:, 20:]).all()


def test_equal_tokens_are_averaged_and_large_scores_do_not_overflow() -> None:
    qkv = np.full((1, 20, 3 * 4), 1e4, np.float32)
    qkv[0, :, 8:] = np.arange(20)[:, None]
    y = np.empty((1, 20, 4), np.float32)
    attention.causal_attention(qkv, y, 1)
    np.testing.assert_allclose(y[0, :, 0], np.arange(20) / 2, rtol=1e-6)


# -- any number of threads -------------------------------------------------------------------


@every_type
def test_the_same_bits_for_any_number_of_threads(dtype: str) -> None:
    x, dy, scale = (normal(shape, dtype, 0) for shape in ((3000, 128), (3000, 128), 128))
    qkv, like_y = normal((24, 128, 3 * 64), dtype, 1), normal((24, 128, 64), dtype, 2)
    results = []
    for threads in (1, 2, 3):
        y, dx, ys, dqkv = (np.empty_like(each) for each in (x, x, like_y, qkv))
        sums = np.empty((2, 128), dtype)
        tokens.gelu(x, y, threads=threads)
        tokens.gelu_backward(dy, y, dx, threads=threads)
        tokens.layer_norm(dx, scale, scale, EPSILON, y, threads=threads)
        tokens.layer_norm_backward(dy, y, scale, EPSILON, dx, *sums, threads=threads)
        attention.causal_attention(qkv, ys, 4, threads=threads)
        attention.causal_attention_backward(ys, qkv, dqkv, 4, threads=threads)
        results.append((y, dx, sums, ys, dqkv))
    for found in results[1:]:
        for got, want in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


def test_errors_name_the_array() -> None:
    x, y = np.zeros((4, 6), np.float32), np.zeros((4, 6))
    with pytest.raises(TypeError, match="gelu: y must be a NumPy array of float32"):
        tokens.gelu(x, y)
    with pytest.raises(ValueError, match="layer_norm: offset must have 6 elements"):
        tokens.layer_norm(x, x[0], x, EPSILON, x)
    with pytest.raises(ValueError, match=r"qkv of shape \(4, 6\) is not \[n, tokens, 3 \* 2 heads"):
        attention.causal_attention(x, x, 2)
    qkv = np.zeros((1, 4, 6), np.float32)
    with pytest.raises(ValueError, match="causal_attention_backward: dy must have 8 elements"):
        attention.causal_attention_backward(x, qkv, qkv, 2)
