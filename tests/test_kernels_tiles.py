"""Convolutions on tiles that multiply bfloat16 parts, against windows and sums in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from convolutions import Case, case
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.device.ops import Window
from minidist.kernels import tiles

pytestmark = pytest.mark.skipif(not tiles.has_tiles(), reason="needs AMX")


def of_shape(of: Case) -> tiles.Convolution:
    window = of.window
    shapes = {"x": of.x.shape, "w": of.w.shape, "y": of.dy.shape}
    return tiles.Convolution(**shapes, strides=window.strides, before=window.before)


def forward(of: Case, *bias: np.ndarray) -> np.ndarray:
    y = np.full_like(of.dy, 7)
    of_shape(of).forward(of.x, of.w, *bias, y)
    return y


def backward_input(of: Case) -> np.ndarray:
    dx = np.full_like(of.x, 7)
    of_shape(of).backward_input(of.dy, of.w, dx)
    return dx


def backward_filter(of: Case) -> np.ndarray:
    dw = np.full_like(of.w, 7)
    of_shape(of).backward_filter(of.x, of.dy, dw)
    return dw


def same(images: int, size: int, channels: int, filters: int, kernel: int, seed: int = 0) -> Case:
    """Return a case whose result is as large as its image."""
    before = (kernel - 1) // 2
    window = Window((kernel,) * 2, (1, 1), (before,) * 2, (kernel - 1 - before,) * 2, (size, size))
    return case(images, (size, size), channels, filters, window, seed)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw shapes of which tiles can do at least one direction, mostly."""
    axes = []
    for least in (1, 5):
        length, kernel = draw(st.integers(least, 20)), draw(st.integers(1, 5))
        before, stride = draw(st.integers(0, kernel + 2)), draw(st.integers(1, 2))
        output = max(length + before + draw(st.integers(0, kernel - 1)) - kernel, 0) // stride + 1
        after = max((output - 1) * stride + kernel - length - before, 0)
        axes.append((length, kernel, stride, before, after, output))
    lengths, kernels, strides, befores, afters, outputs = zip(*axes, strict=True)
    window = Window(kernels, strides, befores, afters, outputs)
    images, seed = draw(st.integers(1, 8)), draw(st.integers(0, 99))
    channels, filters = (draw(st.sampled_from([16, 32, 48, 64])) for _ in range(2))
    return case(images, lengths, channels, filters, window, seed)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_whole_numbers_are_exact_in_every_direction(of: Case) -> None:
    ways = of_shape(of)
    if ways.can_forward:
        np.testing.assert_array_equal(forward(of), of.y())
    if ways.can_backward_input:
        np.testing.assert_array_equal(backward_input(of), of.dx())
    if ways.can_backward_filter:
        np.testing.assert_array_equal(backward_filter(of), of.dw())


@pytest.mark.parametrize(
    "of",
    [
        same(2, 32, 16, 16, 3),  # a group of one image, and pairs of pixels
        same(4, 8, 64, 96, 3),  # two images in a tile
        same(8, 7, 32, 16, 3),  # tiles that reach over each other
        same(2, 28, 32, 64, 5),
        same(5, 16, 16, 32, 1),  # a group that lacks an image
        same(3, 12, 32, 16, 3),
    ],
    ids=lambda of: str(of.x.shape + of.w.shape),
)
def test_tiles_do_what_resnets_and_lenet_need(of: Case) -> None:
    ways = of_shape(of)
    assert ways.can_forward and ways.can_backward_input and ways.can_backward_filter
    np.testing.assert_array_equal(forward(of), of.y())
    np.testing.assert_array_equal(backward_input(of), of.dx())
    np.testing.assert_array_equal(backward_filter(of), of.dw())


def test_windows_that_begin_within_the_image_are_refused() -> None:
    """Of the image's gradient those of dy do so, where there is more padding than a window."""
    of = same(2, 16, 16, 16, 3)
    shapes = {"x": of.x.shape, "w": of.w.shape, "y": of.dy.shape, "strides": (1, 1)}
    for before in ((-1, 1), (1, -1)):
        ways = tiles.Convolution(**shapes, before=before)
        assert not ways.can_forward and not ways.can_backward_filter
    for before in ((3, 1), (1, 3)):
        ways = tiles.Convolution(**shapes, before=before)
        assert ways.can_forward and ways.can_backward_filter and not ways.can_backward_input


@pytest.mark.parametrize(("images", "size"), [(2, 32), (4, 8)])
def test_a_bias_is_added(images: int, size: int) -> None:
    of = same(images, size, 32, 48, 3)
    bias = np.arange(48, dtype=np.float32)
    np.testing.assert_array_equal(forward(of, bias), of.y() + bias)


def test_every_bit_of_a_number_counts() -> None:
    """Multiplied by one each number is itself, which takes all of its parts."""
    of = same(2, 16, 32, 32, 1)
    rng = np.random.default_rng(3)
    of.x[...] = rng.standard_normal(of.x.shape) * 10.0 ** rng.integers(-20, 20, of.x.shape)
    of.dy[...] = of.x
    of.w[0, 0] = np.eye(32, dtype=np.float32)
    np.testing.assert_array_equal(forward(of), of.x)
    np.testing.assert_array_equal(backward_input(of), of.x)


@pytest.mark.parametrize(
    ("run", "exact"),
    [(forward, Case.y), (backward_input, Case.dx), (backward_filter, Case.dw)],
)
def test_errors_are_those_of_float32(
    run: Callable[[Case], np.ndarray], exact: Callable[[Case], np.ndarray]
) -> None:
    """No further off than a sum of float32 products, one after the other, may be on average."""
    of = same(4, 8, 64, 64, 3)
    rng = np.random.default_rng(1)
    for array in of[:3]:
        array[...] = rng.standard_normal(array.shape)
    wide = Case(*(np.float64(array) for array in of[:3]), of.window)
    error = run(of) - exact(wide)
    assert np.sqrt(np.mean(error**2)) < 4 * 2.0**-24 * np.sqrt(np.mean(exact(wide) ** 2))


def test_nan_and_infinity_come_through() -> None:
    of = same(2, 16, 16, 16, 3)
    of.x[0, 4, 4, 3], of.dy[1, 9, 9, 5] = np.nan, np.inf
    assert np.isnan(forward(of)[0, 3:6, 3:6]).all()
    assert np.isnan(backward_input(of)[1, 8:11, 8:11]).all()
    dw = backward_filter(of)
    assert np.isnan(dw[:, :, 3]).all() and np.isnan(dw[..., 5]).all()


def test_alignment_does_not_matter() -> None:
    of = same(2, 8, 16, 16, 3)
    shifted = [np.empty(each.size + 1, np.float32)[1:].reshape(each.shape) for each in of[:3]]
    for to, each in zip(shifted, of, strict=False):
        to[...] = each
    other = Case(*shifted, of.window)
    np.testing.assert_array_equal(forward(other), of.y())
    np.testing.assert_array_equal(backward_filter(other), of.dw())


def test_what_does_not_fit_is_refused() -> None:
    of = same(2, 8, 16, 16, 3)
    ways = of_shape(of)
    assert not of_shape(same(2, 8, 3, 16, 3)).can_forward  # three channels
    assert not of_shape(same(2, 8, 16, 10, 3)).can_backward_filter
    assert not of_shape(same(0, 8, 16, 16, 3)).can_forward
    with pytest.raises(ValueError, match="tiles cannot do that here"):
        forward(same(2, 8, 3, 16, 3))
    with pytest.raises(ValueError, match="w must"):
        ways.forward(of.x, of.w[1:], of.dy)
    with pytest.raises(ValueError, match="C-contiguous"):
        ways.forward(of.x[:, ::-1], of.w, of.dy)
    with pytest.raises(TypeError, match="dy must be a NumPy array of float32"):
        ways.backward_input(of.dy.astype(np.float64), of.w, of.x)
    with pytest.raises(ValueError, match="bias must"):
        ways.forward(of.x, of.w, np.zeros(3, np.float32), of.dy)
    of.w.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ways.backward_filter(of.x, of.dy, of.w)
