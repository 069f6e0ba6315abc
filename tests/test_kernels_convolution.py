"""The filter's gradient straight from the images, against windows and sums in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from convolutions import Case, case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.device.ops import Window
from minidist.kernels.convolution import can_filter_gradient, filter_gradient

pytestmark = pytest.mark.skipif(not can_filter_gradient(8), reason="needs AVX2")
ONE = Window((3, 3), (1, 1), (1, 1), (1, 1), (5, 5))


def gradient(of: Case) -> np.ndarray:
    dw = np.full_like(of.w, 7)
    filter_gradient(of.x, of.dy, dw, *of.window.strides, *of.window.before)
    return dw


@given(cases(st.sampled_from([8, 16, 24, 32, 40, 48, 64, 72, 112])))
@settings(max_examples=150, deadline=None)
def test_it_is_the_sum_over_all_windows(of: Case) -> None:
    np.testing.assert_array_equal(gradient(of), of.dw())


@pytest.mark.parametrize("channels", range(1, 30))
@pytest.mark.parametrize("filters", [8, 16, 32, 64])
def test_every_height_and_width_of_a_tile(channels: int, filters: int) -> None:
    of = case(2, (5, 5), channels, filters, ONE)
    np.testing.assert_array_equal(gradient(of), of.dw())


@pytest.mark.parametrize("padding", [0, 1])
def test_an_image_of_several_blocks_of_rows(padding: int) -> None:
    rows = 150 + 2 * padding - 2
    window = Window((3, 3), (1, 1), (padding,) * 2, (padding,) * 2, (rows, rows))
    of = case(2, (150, 150), 3, 16, window)
    np.testing.assert_array_equal(gradient(of), of.dw())


@pytest.mark.parametrize(("channels", "filters"), [(0, 0), (0, 8), (3, 0)])
def test_nothing_has_no_gradient(channels: int, filters: int) -> None:
    shapes = (1, 5, 5, channels), (1, 5, 5, filters), (3, 3, channels, filters)
    x, dy, dw = (np.zeros(shape, np.float32) for shape in shapes)
    filter_gradient(x, dy, dw, 1, 1, 1, 1)


def test_nan_and_infinity_come_through() -> None:
    of = case(1, (5, 5), 1, 8, ONE)
    of.x[0, 2, 2, 0], of.dy[0, 2, 2, 0] = np.nan, np.inf
    dw = gradient(of)
    assert np.isnan(dw[1, 1, 0]).all() and not np.isfinite(dw[..., 0]).any()


def test_alignment_does_not_matter() -> None:
    of = case(1, (5, 5), 2, 16, ONE)
    shifted = [np.empty(each.size + 1, np.float32)[1:].reshape(each.shape) for each in of[:3]]
    for to, each in zip(shifted, of, strict=False):
        to[...] = each
    np.testing.assert_array_equal(gradient(Case(*shifted, ONE)), of.dw())


def test_what_does_not_fit_is_refused() -> None:
    of = case(1, (5, 5), 2, 16, ONE)
    with pytest.raises(ValueError, match="no vectors for 5 filters"):
        gradient(case(1, (5, 5), 2, 5, ONE))
    with pytest.raises(ValueError, match="needs x"):
        filter_gradient(of.x[..., :1], of.dy, of.w, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        filter_gradient(of.x, of.dy, of.w, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="C-contiguous"):
        filter_gradient(of.x[:, ::-1], of.dy, of.w, 1, 1, 1, 1)
    with pytest.raises(TypeError, match="dy must be a NumPy array of float32"):
        filter_gradient(of.x, of.dy.astype(np.float64), of.w, 1, 1, 1, 1)
    of.w.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        filter_gradient(of.x, of.dy, of.w, 1, 1, 1, 1)
