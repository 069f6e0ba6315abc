"""Local response normalisation: its values, slopes, narrow dtypes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import nn, ops
from minidist.errors import ShapeError, UsageError

quick = settings(deadline=None, max_examples=20)


def by_loops(x: np.ndarray, radius: int, bias: float, alpha: float, beta: float) -> np.ndarray:
    y = np.empty_like(x)
    for place in np.ndindex(x.shape):
        *row, i = place
        near = x[tuple(row)][max(0, i - radius) : i + radius + 1]
        y[place] = x[place] / (bias + alpha * (near**2).sum()) ** beta
    return y


hyperparameters = st.tuples(
    st.integers(0, 3),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0, 0.1, 1.0]),
    st.sampled_from([0.5, 0.75]),
)


@quick
@given(st.lists(st.integers(0, 3), max_size=2), st.integers(1, 5), hyperparameters)
def test_values_and_slopes(rows: list[int], channels: int, how: tuple[int, float, float, float]):
    rng = np.random.default_rng(0)
    x, dy, direction = (rng.standard_normal((*rows, channels)) for _ in range(3))
    source = ops.constant(x)
    with md.GradientTape() as tape:
        tape.watch(source)
        y = ops.local_response_norm(source, *how)
        total = ops.reduce_sum(y * ops.constant(dy))
    np.testing.assert_allclose(y.numpy(), by_loops(x, *how), rtol=1e-12)
    ends = [(dy * by_loops(x + step * direction, *how)).sum() for step in (1e-6, -1e-6)]
    slope = (tape.gradient(total, source).numpy() * direction).sum()
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 1.6e-2)])
def test_narrow_numbers_are_computed_in_float32(dtype: str, bound: float):
    x = ops.cast(np.float32([[1, -2, 300], [0.5, 4, 250]]), dtype)  # squares overflow float16
    how = (1, 1.0, 0.1, 0.75)
    with md.GradientTape() as tape:
        tape.watch(x)
        y = ops.local_response_norm(x, *how)
    assert y.dtype == x.dtype == tape.gradient(y, x).dtype
    wide = ops.cast(x, "float64").numpy()
    np.testing.assert_allclose(ops.cast(y, "float64"), by_loops(wide, *how), rtol=bound)


def test_the_layer_takes_its_numbers_along():
    layer = nn.LocalResponseNorm(1, bias=2.0, alpha=0.5, beta=0.75)
    assert layer.build((2, 2, 3), "float64") == (2, 2, 3)
    assert layer.variables == []
    x = np.random.default_rng(1).standard_normal((2, 2, 2, 3))
    np.testing.assert_allclose(layer(x).numpy(), by_loops(x, 1, 2.0, 0.5, 0.75), rtol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        {"radius": -1},
        {"radius": 1.5},
        {"radius": True},
        {"alpha": -0.1},
        {"alpha": np.nan},
        {"bias": 0.0},
        {"bias": np.nan},
    ],
)
def test_what_could_divide_by_nothing_is_refused(how: dict[str, float]):
    with pytest.raises(UsageError, match="radius and an alpha of at least 0 and a bias above 0"):
        ops.local_response_norm(np.ones((2, 3)), **how)
    with pytest.raises(UsageError, match=r"local_response_norm: radius .* take a whole radius"):
        nn.LocalResponseNorm(**how)


def test_a_number_has_no_channels():
    with pytest.raises(ShapeError, match=r"shape \(\) has no last axis"):
        ops.local_response_norm(1.0)
    with pytest.raises(ShapeError, match=r"'local_response_norm'.*need a last axis"):
        nn.LocalResponseNorm().build(())
