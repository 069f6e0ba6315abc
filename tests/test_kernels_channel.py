"""Channel kernels against NumPy in float64, against each other, and for any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels import channel, plain

EPSILON = 1e-3
DTYPES = ["float32", "float64"]
SHAPES = [
    (0, 3),
    (1, 1),
    (7, 3),
    (5, 17),
    (3, 1000),
    (40, 300),  # one long row is one row
    (9, 11, 13, 5),  # blocks end within a group, groups within a long row
    (8, 30, 31, 16),
    (300, 700),  # several groups
]


def normal(shape: Any, dtype: str, seed: int, mean: float = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) + mean, dtype)


def exact(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).reshape(-1, x.shape[-1])


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Within what rounding makes of the largest number."""
    bound = 1e-5 if got.dtype == np.float32 else 1e-13
    size = max(1.0, float(np.abs(want).max(initial=0)))
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=bound * size)


class Batch:
    """Arrays of one shape, and what belongs to their channels."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.x, self.dy, self.add = (normal(shape, dtype, seed, 2) for seed in range(3))
        self.dy -= 2
        self.scale, self.offset = (normal(shape[-1], dtype, seed) for seed in (3, 4))
        self.mean, self.variance, self.dscale, self.doffset = np.full((4, shape[-1]), 7, dtype)
        channel.moments(self.x, self.mean, self.variance)

    def normalize(self, add: np.ndarray | None, relu: bool, threads: int = 1) -> np.ndarray:
        y = np.full_like(self.x, 7)
        given = (self.x, self.mean, self.variance, self.scale, self.offset, EPSILON)
        channel.normalize(*given, y, add, relu=relu, threads=threads)
        return y

    def backward(
        self, dy: np.ndarray, moments: bool, *relu: np.ndarray, threads: int = 1
    ) -> list[np.ndarray]:
        dx = np.full_like(self.x, 7)
        given = (dy, self.x, self.mean, self.variance, self.scale, EPSILON, moments)
        results = (dx, self.dscale.copy(), self.doffset.copy())
        channel.normalize_backward(*given, *results, *relu, threads=threads)
        return list(results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_moments(shape: tuple[int, ...], dtype: str) -> None:
    batch = Batch(shape, dtype)
    x = exact(batch.x)
    wanted = plain.moments(x) if len(x) else np.zeros((2, shape[-1]))
    close(batch.mean, wanted[0])
    close(batch.variance, wanted[1])


def test_the_variance_of_numbers_far_from_zero() -> None:
    x = normal((3000, 3), "float32", 0, mean=1e4)
    mean, variance = np.empty((2, 3), np.float32)
    channel.moments(x, mean, variance)
    wanted = plain.moments(x.astype(np.float64))
    np.testing.assert_allclose(mean, wanted[0], rtol=5e-7)
    np.testing.assert_allclose(variance, wanted[1], rtol=1e-4)


def test_blocks_are_short_enough_for_sums_in_float32() -> None:
    x = normal((3000, 300), "float32", 0, mean=2)
    mean, variance = np.empty((2, 300), np.float32)
    channel.moments(x, mean, variance)
    wanted = plain.moments(x.astype(np.float64))
    np.testing.assert_allclose(mean, wanted[0], rtol=0, atol=2.5e-7)
    np.testing.assert_allclose(variance, wanted[1], rtol=1.2e-7)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 131_073), "float32"),
        ((2, 200_000), "float32"),
        ((3, 500_000), "float32"),
        ((1, 70_000), "float64"),
    ],
)
def test_rows_that_are_fewer_than_a_thread_is_worth(shape: tuple[int, ...], dtype: str) -> None:
    batch = Batch(shape, dtype)
    wanted = plain.moments(exact(batch.x))
    close(batch.mean, wanted[0])
    close(batch.variance, wanted[1])
    dbias = np.full(shape[-1], 7, dtype)
    channel.bias_backward(batch.dy, dbias)
    close(dbias, exact(batch.dy).sum(axis=0))
    dscale, doffset = batch.backward(batch.dy, True)[1:]
    normal = (exact(batch.x) - batch.mean) / np.sqrt(exact(batch.variance[None]) + EPSILON)
    close(dscale, (exact(batch.dy) * normal).sum(axis=0))
    np.testing.assert_array_equal(doffset, dbias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_normalize_alone_and_with_what_is_fused(shape: tuple[int, ...], dtype: str) -> None:
    batch = Batch(shape, dtype)
    given = [exact(batch.x), batch.mean, batch.variance, batch.scale, batch.offset]
    y = batch.normalize(None, False)
    close(y, plain.normalize(*(np.asarray(array, np.float64) for array in given), EPSILON))
    np.testing.assert_array_equal(batch.normalize(batch.add, False), y + batch.add)
    np.testing.assert_array_equal(batch.normalize(None, True), plain.relu(y))
    np.testing.assert_array_equal(batch.normalize(batch.add, True), plain.relu(y + batch.add))


@pytest.mark.parametrize("moments", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradients_of_normalize(shape: tuple[int, ...], dtype: str, moments: bool) -> None:
    batch = Batch(shape, dtype)
    got = batch.backward(batch.dy, moments)
    given = [exact(batch.dy), exact(batch.x), batch.mean, batch.variance, batch.scale]
    if batch.x.size:
        wanted = plain.normalize_backward(
            *(np.asarray(array, np.float64) for array in given), EPSILON, moments
        )
        for one, other in zip(got, wanted, strict=True):
            close(one, other)
    else:
        assert not got[1].any() and not got[2].any()

    y = batch.normalize(batch.add, True)
    dz = np.full_like(y, 7)
    fused = batch.backward(batch.dy, moments, y, dz)
    np.testing.assert_array_equal(dz, plain.relu_backward(batch.dy, y))
    for one, other in zip(fused, batch.backward(dz, moments), strict=True):
        np.testing.assert_array_equal(one, other)

    dx = np.full_like(y, 7)
    given = (batch.dy, batch.x, batch.mean, batch.variance, batch.scale, EPSILON, moments)
    channel.normalize_backward(*given, dx, batch.dscale, batch.doffset, y, dx)
    np.testing.assert_array_equal(dx, fused[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_its_relu_and_their_gradients(shape: tuple[int, ...], dtype: str) -> None:
    batch = Batch(shape, dtype)
    y, z = np.full_like(batch.x, 7), batch.x - 2
    channel.bias(z, batch.offset, y)
    np.testing.assert_array_equal(y, z + batch.offset)
    channel.bias(z, batch.offset, z, relu=True)
    np.testing.assert_array_equal(z, plain.relu(y))

    dz, dbias = np.full_like(z, 7), np.full(shape[-1], 7, dtype)
    channel.bias_backward(batch.dy, dbias, z, dz)
    wanted = plain.relu_backward(batch.dy, z)
    np.testing.assert_array_equal(dz, wanted)
    close(dbias, exact(wanted).sum(axis=0))
    again = np.full_like(dbias, 7)
    channel.bias_backward(dz, again)
    np.testing.assert_array_equal(again, dbias)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 700), st.integers(1, 600), st.sampled_from(DTYPES), st.integers(2, 4))
def test_threads_change_no_bit(rows: int, channels: int, dtype: str, threads: int) -> None:
    batch = Batch((rows, channels), dtype)
    mean, variance = np.empty((2, channels), dtype)
    channel.moments(batch.x, mean, variance, threads=threads)
    np.testing.assert_array_equal([mean, variance], [batch.mean, batch.variance])
    y = batch.normalize(batch.add, True)
    np.testing.assert_array_equal(batch.normalize(batch.add, True, threads), y)
    one = batch.backward(batch.dy, True, y, np.empty_like(y))
    several = batch.backward(batch.dy, True, y, np.empty_like(y), threads=threads)
    for a, b in zip(one, several, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_goes_through() -> None:
    x, y = np.array([[np.nan, -1.0]]), np.empty((1, 2))
    channel.bias(x, np.zeros(2), y, relu=True)
    np.testing.assert_array_equal(y, [[np.nan, 0]])
    mean, variance = np.empty((2, 2))
    channel.moments(x, mean, variance)
    np.testing.assert_array_equal([mean, variance], [[np.nan, -1], [np.nan, 0]])


def test_mistakes_name_the_array() -> None:
    x, c = np.zeros((4, 3), np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="moments: mean must have 3 elements"):
        channel.moments(x, c[:2], c.copy())
    with pytest.raises(ValueError, match="normalize: add must have 12 elements"):
        channel.normalize(x, c, c, c, c, EPSILON, x, x[:2])
    with pytest.raises(TypeError, match="bias_backward: dz must be a NumPy array of float32"):
        channel.bias_backward(x, c, x)
    with pytest.raises(ValueError, match=r"bias: x must be \[..., channels\]"):
        channel.bias(np.zeros((), np.float32), c, np.zeros((), np.float32))
