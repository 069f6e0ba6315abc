"""Image kernels against NumPy, colorsys and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels import image, plain

KEY, COUNTER = (0xDEADBEEF, 42), (7, 9)
ONE, ZERO = np.ones(3, np.float32), np.zeros(3, np.float32)
METHODS = ["bilinear", "nearest", "bicubic", "area"]


def picture(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# -- crop and mirror -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 12))
def test_crops_are_those_of_numpy(h: int, w: int, c: int, pad: int) -> None:
    images, numbers = picture(30, h, w, c), np.arange(29, -1, -1)
    scale, shift = np.linspace(0.1, 2, c, dtype=np.float32), np.arange(c, dtype=np.float32)
    out = np.full((30, h, w, c), np.nan, np.float32)
    image.crop(images, numbers, scale, shift, out, pad, KEY, COUNTER)
    bytes_ = plain.crop(images, numbers, pad, KEY, COUNTER)
    np.testing.assert_array_equal(out, bytes_.astype(np.float32) * scale + shift)


def test_crops_are_evenly_distributed_and_half_are_mirrored() -> None:
    images = np.zeros((1, 5, 5, 1), np.uint8)
    images[0, 2, 1] = 1  # one bright pixel shows what was done
    found = np.zeros((5, 5))
    out = np.empty((1, 5, 5, 1), np.float32)
    for epoch in range(5000):
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        image.crop(images, np.zeros(1, np.int64), one, zero, out, 1, KEY, (epoch, 0))
        found += out[0, ..., 0]
    expected = np.zeros((5, 5))
    for down in (1, 2, 3):
        for right in (0, 1, 2):
            expected[down, right] += 5000 / 18
            expected[down, 4 - right] += 5000 / 18
    assert ((found - expected) ** 2 / np.maximum(expected, 1)).sum() < 40  # chi² of 14: 1 in 4000


def test_without_distortion_only_the_range_changes() -> None:
    images, out = picture(3, 4, 5, 2), np.empty((2, 4, 5, 2), np.float32)
    scale, shift = np.float32([2, 3]), np.float32([-1, 1])
    image.crop(images, np.array([2, 0]), scale, shift, out)
    np.testing.assert_array_equal(out, images[[2, 0]].astype(np.float32) * scale + shift)


# -- resize ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_resizing_is_a_product_with_two_matrices(method: str, data: Any) -> None:
    h, w, rows, columns = (data.draw(st.integers(1, 40)) for _ in range(4))
    height, width = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    top, left = data.draw(st.integers(0, rows - height)), data.draw(st.integers(0, columns - width))
    mirrored = data.draw(st.booleans())
    pixels, out = picture(h, w, 3, seed=h), np.full((height, width, 3), np.nan, np.float32)
    scale, shift = np.float32([1, 0.5, 2]), np.float32([0, 1, -1])
    image.resize(pixels, method, scale, shift, out, (rows, columns), top, left, mirrored)
    down = plain.resize_matrix(method, h, rows, top, height)
    across = plain.resize_matrix(method, w, columns, left, width)
    expected = np.einsum("yh,hwc,xw->yxc", down, pixels, across) * scale + shift
    np.testing.assert_allclose(out[:, :: -1 if mirrored else 1], expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_size_changes_nothing(method: str) -> None:
    pixels, out = picture(17, 9, 3), np.empty((17, 9, 3), np.float32)
    image.resize(pixels, method, ONE, ZERO, out)
    np.testing.assert_array_equal(out, pixels)


def test_area_of_a_whole_multiple_is_the_mean() -> None:
    pixels, out = picture(12, 20, 3), np.empty((4, 4, 3), np.float32)
    image.resize(pixels, "area", ONE, ZERO, out)
    np.testing.assert_allclose(out, pixels.reshape(4, 3, 4, 5, 3).mean((1, 3)), rtol=1e-5)


# -- colours ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 2), st.floats(-3, 3), st.integers(1, 130))
def test_saturation_and_hue_are_those_of_colorsys(
    saturation: float, turns: float, count: int
) -> None:
    pixels = np.random.default_rng(count).random((count, 3), np.float32)
    pixels[0] = 0.5  # grey has no hue
    expected = [plain.turn_colour(each, saturation, turns) for each in pixels.tolist()]
    image.distort(pixels, ONE, ZERO, 0, 1, saturation, turns)
    np.testing.assert_allclose(pixels, expected, atol=2e-5)


@pytest.mark.parametrize("contrast_first", [False, True])
@pytest.mark.parametrize("in_hsv", [False, True])
def test_the_order_of_distortions(contrast_first: bool, in_hsv: bool) -> None:
    pixels = np.random.default_rng(0).random((7, 31, 3), np.float32)
    matrix = np.random.default_rng(1).random((3, 3), np.float32) * 0.5
    scale, shift = np.float32([2, 3, 4]), np.float32([-1, 0, 1])

    def colour(x: np.ndarray) -> np.ndarray:
        if in_hsv:  # of colours outside 0 to 1 colorsys has another idea
            return np.array([plain.turn_colour(each, 0.7, 0.1) for each in x.reshape(-1, 3)])
        return x @ matrix.T

    def contrast(x: np.ndarray) -> np.ndarray:
        mean = x.reshape(-1, 3).mean(0)
        return (x - mean) * (0.5 if in_hsv else 1.4) + mean

    steps = [contrast, colour] if contrast_first else [colour, contrast]
    expected = steps[1](steps[0](pixels.astype(np.float64) + 0.05).reshape(-1, 3))
    expected = np.clip(expected, 0, 1) * scale + shift
    how = (0.05, 0.5 if in_hsv else 1.4, 0.7, 0.1, None if in_hsv else matrix, contrast_first)
    image.distort(pixels, scale, shift, *how)
    np.testing.assert_allclose(pixels.reshape(-1, 3), expected, atol=1e-4)


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: image.crop(picture(2, 3, 3), *[None] * 4), ValueError, r"\[n, h, w, c\]"),
        (
            lambda: image.crop(
                picture(2, 3, 3, 3), np.array([2]), ONE, ZERO, np.empty((1, 3, 3, 3), np.float32)
            ),
            ValueError,
            "no image 2 among 2",
        ),
        (
            lambda: image.crop(
                picture(2, 3, 3, 3), np.array([1]), ONE, ZERO[:2], np.empty((1, 3, 3, 3), "f")
            ),
            ValueError,
            "shift must have 3 elements",
        ),
        (
            lambda: image.resize(picture(3, 3, 1), "area", ONE, ZERO, None),
            ValueError,
            r"image must be \[h, w, 3\]",
        ),
        (
            lambda: image.resize(
                picture(3, 3, 3), "area", ONE, ZERO, np.empty((2, 2, 3), np.float64)
            ),
            TypeError,
            "out must be a NumPy array of float32",
        ),
        (
            lambda: image.resize(
                picture(3, 3, 3), "area", ONE, ZERO, np.empty((2, 2, 3), "f"), (4, 4), 3, 0
            ),
            ValueError,
            r"2x2 from \(3, 0\) on is no part of 4x4",
        ),
        (
            lambda: image.distort(np.empty((4, 2), "f"), ONE, ZERO, 0, 1, 1, 0),
            ValueError,
            r"pixels must be \[..., 3\]",
        ),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
