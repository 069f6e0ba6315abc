"""Products on tiles that multiply bfloat16 parts, against sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minidist.kernels import tiles

pytestmark = pytest.mark.skipif(not tiles.has_tiles(), reason="needs AMX")

Array = NDArray[Any]
lengths = st.one_of(st.integers(1, 40), st.integers(1, 600))


def product(a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
    """Return a [n, k] times b [k, m], each handed over transposed if so said."""
    c = np.full((len(a), b.shape[1]), 7, np.float32)
    given_a, given_b = (
        np.ascontiguousarray(each.T if turned else each)
        for each, turned in ((a, transpose_a), (b, transpose_b))
    )
    tiles.multiply(given_a, given_b, c, transpose_a, transpose_b)
    return c


def whole(*shapes: tuple[int, int], seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes]


@given(lengths, lengths, lengths, st.booleans(), st.booleans(), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_whole_numbers_are_exact(n, k, m, transpose_a, transpose_b, seed) -> None:
    a, b = whole((n, k), (k, m), seed=seed)
    np.testing.assert_array_equal(product(a, b, transpose_a, transpose_b), a @ b)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "m"),
    [
        (64, 784, 1024),  # several passes, of which the last has no whole step
        (64, 1024, 192),
        (784, 64, 1024),
        (64, 3136, 512),  # what is held does not fit
        (1300, 256, 70),  # neither does what is held in one pass
        (128, 40, 64),
    ],
)
def test_every_way_to_hold_and_to_turn(n, k, m, transpose_a, transpose_b) -> None:
    a, b = whole((n, k), (k, m))
    np.testing.assert_array_equal(product(a, b, transpose_a, transpose_b), a @ b)


@pytest.mark.parametrize(("n", "k", "m"), [(0, 3, 2), (2, 0, 3), (3, 2, 0), (0, 0, 0)])
def test_a_sum_of_nothing_is_zero(n, k, m) -> None:
    a, b = np.ones((n, k), np.float32), np.ones((k, m), np.float32)
    np.testing.assert_array_equal(product(a, b), np.zeros((n, m)))


@pytest.mark.parametrize("transpose_b", [False, True])
def test_every_bit_of_a_number_counts(transpose_b) -> None:
    """Multiplied by one each number is itself, which takes all of its parts."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((70, 90)) * 10.0 ** rng.integers(-20, 20, (70, 90))).astype("f")
    np.testing.assert_array_equal(product(x, np.eye(90, dtype="f"), False, transpose_b), x)
    np.testing.assert_array_equal(product(np.eye(70, dtype="f"), x, False, transpose_b), x)


@pytest.mark.parametrize(("n", "k", "m"), [(64, 10, 1024), (64, 784, 256), (1024, 64, 256)])
def test_it_is_as_exact_as_float32(n, k, m) -> None:
    """Errors are those of adding one product after the other in float32, or smaller."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((n, k), "f"), rng.standard_normal((k, m), "f")
    exact = np.float64(a) @ b
    one_by_one = np.zeros((n, m), "f")
    for i in range(k):
        one_by_one += a[:, i : i + 1] * b[i]
    c = product(a, b)
    mine, theirs = (np.sqrt(np.mean((each - exact) ** 2)) for each in (c, one_by_one))
    assert mine < theirs
    assert (np.abs(c - exact) < 3e-7 * (np.abs(np.float64(a)) @ np.abs(b))).all()


def test_nan_comes_through_and_infinity_becomes_one() -> None:
    a, b = whole((40, 50), (50, 60))
    a[3, 4], b[7, 8] = np.nan, np.inf
    c = product(a, b)
    assert np.isnan(c[3]).all() and np.isnan(c[:, 8]).all()
    c[3], c[:, 8] = 0, 0
    assert np.isfinite(c).all()


def test_alignment_does_not_matter() -> None:
    a, b = whole((70, 80), (80, 90))
    shapes = (70, 80), (80, 90), (70, 90)
    rooms = [np.zeros(n * m + 1, "f") for n, m in shapes]
    shifted_a, shifted_b, c = (
        room[1:].reshape(shape) for room, shape in zip(rooms, shapes, strict=True)
    )
    shifted_a[...], shifted_b[...] = a, b
    tiles.multiply(shifted_a, shifted_b, c)
    np.testing.assert_array_equal(c, a @ b)
    assert rooms[2][0] == 0


def test_what_does_not_fit_is_refused() -> None:
    a, b = whole((3, 4), (4, 5))
    c = np.zeros((3, 5), np.float32)
    with pytest.raises(ValueError, match=r"needs a \[n, k\]"):
        tiles.multiply(a, b, c, transpose_a=True)
    with pytest.raises(ValueError, match=r"needs a \[n, k\]"):
        tiles.multiply(a, b, c.T)
    with pytest.raises(TypeError, match="b must be a NumPy array of float32"):
        tiles.multiply(a, np.float64(b), c)
    with pytest.raises(ValueError, match="a must be C-contiguous"):
        tiles.multiply(np.zeros((4, 3), "f").T, b, c)
    c.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        tiles.multiply(a, b, c)
