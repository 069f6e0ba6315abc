"""Depthwise convolution against the same formulas in NumPy, and its bits for any threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels import depthwise, plain

BOUND = {"float32": 2e-5, "float64": 1e-12}


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], plain.Windows]:
    """Images and windows over them, of which each reaches into its image."""
    shape = tuple(draw(st.integers(low, high)) for low, high in [(0, 3), (1, 12), (1, 12), (0, 37)])
    size, strides, before, output = [], [], [], []
    for length in shape[1:3]:
        k, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        pad = draw(st.integers(0, k - 1))
        size.append(k)
        strides.append(stride)
        before.append(pad)
        output.append(draw(st.integers(1, (length - 1 + pad) // stride + 1)))
    return shape, plain.Windows(*((a, b) for a, b in (output, size, strides, before)))


def compare(shape: tuple[int, ...], windows: plain.Windows, dtype: str, threads: int) -> None:
    x, w = normal(shape, dtype), normal((*windows.size, shape[3]), dtype, 1)
    where: Any = (*windows.strides, *windows.before)
    y = np.full((shape[0], *windows.output, shape[3]), np.nan, dtype)
    depthwise.forward(x, w, y, *where, threads=threads)
    np.testing.assert_array_equal(y, plain.depthwise(x, w, windows))

    dy, dx, dw = normal(y.shape, dtype, 2), np.full_like(x, np.nan), np.full_like(w, np.nan)
    depthwise.backward_input(dy, w, dx, *where, threads=threads)
    np.testing.assert_array_equal(dx, plain.depthwise_backward_input(dy, w, shape, windows))
    depthwise.backward_filter(x, dy, dw, *where, threads=threads)
    want = plain.depthwise_backward_filter(x, dy, windows)
    bound = BOUND[dtype] * max(1, shape[0] * windows.output[0] * windows.output[1]) ** 0.5
    np.testing.assert_allclose(dw, want, rtol=BOUND[dtype], atol=bound)

    alone = np.empty_like(dw)
    depthwise.backward_filter(x, dy, alone, *where)
    np.testing.assert_array_equal(alone, dw)


@settings(max_examples=100, deadline=None)
@given(geometries(), st.sampled_from(["float32", "float64"]), st.sampled_from([1, 2, 3]))
def test_equals_its_twin(geometry: Any, dtype: str, threads: int) -> None:
    compare(*geometry, dtype, threads)


@pytest.mark.parametrize("strides", [1, 2])
def test_large_images_equal_the_twin(strides: int) -> None:
    length = -(-33 // strides)
    compare(
        (4, 33, 33, 50),
        plain.Windows((length, length), (3, 3), (strides, strides), (1, 1)),
        "float32",
        threads=3,
    )


def test_a_long_sum_of_numbers_of_one_sign_keeps_its_digits() -> None:
    rng = np.random.default_rng(0)
    x, dy = (1 + rng.random((16, 64, 64, 17), np.float32) for _ in range(2))
    dw = np.empty((3, 3, 17), np.float32)
    depthwise.backward_filter(x, dy, dw, 1, 1, 1, 1)
    windows = plain.Windows((64, 64), (3, 3), (1, 1), (1, 1))
    want = plain.depthwise_backward_filter(x, dy, windows)
    np.testing.assert_allclose(dw, want, rtol=1e-7)  # a running sum in float32 is off by 8e-7


def test_a_filter_of_one_in_the_middle_changes_nothing() -> None:
    x, w = normal((2, 5, 6, 20), "float32"), np.zeros((3, 3, 20), "float32")
    w[1, 1] = np.arange(20)
    y = np.empty_like(x)
    depthwise.forward(x, w, y, 1, 1, 1, 1)
    np.testing.assert_array_equal(y, x * np.arange(20, dtype="float32"))


def test_only_the_channel_of_a_nan_is_touched() -> None:
    x, w = normal((1, 4, 4, 17), "float32"), normal((3, 3, 17), "float32")
    x[0, 1, 1, 16] = np.nan
    y = np.empty_like(x)
    depthwise.forward(x, w, y, 1, 1, 1, 1)
    assert np.isfinite(y[..., :16]).all()
    assert np.isnan(y[..., 16]).sum() == 9


def test_errors_name_what_is_wrong() -> None:
    x, w = np.zeros((1, 4, 4, 2)), np.zeros((3, 3, 2))
    with pytest.raises(ValueError, match=r"depthwise forward: needs images .*\(3, 3, 3\)"):
        depthwise.forward(x, np.zeros((3, 3, 3)), x.copy(), 1, 1, 1, 1)
    with pytest.raises(TypeError, match="w must be a NumPy array of float64"):
        depthwise.forward(x, w.astype("float32"), x.copy(), 1, 1, 1, 1)
    with pytest.raises(ValueError, match="lie wholly outside"):
        depthwise.backward_input(np.zeros((1, 9, 9, 2)), w, x, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="backward_filter: dw must be"):
        depthwise.backward_filter(x, x.copy(), np.zeros((2, 3, 3)).T, 1, 1, 1, 1)
