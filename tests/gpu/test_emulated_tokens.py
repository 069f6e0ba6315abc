"""tokens.cu and attention.cu, run thread by thread on the CPU, against plain.py and tokens.pyx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulator import ORDERS, TYPES, Emulator, assert_same_bits

from minidist.dtypes import as_array
from minidist.kernels import gpu_attention, gpu_tokens, grid, plain, tokens

SHAPES = [(1, 1), (5, 3), (300, 8), (70, 40), (9, 300)]
EPSILON = 1e-3
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
Place = Callable[..., np.ndarray]

every_type = pytest.mark.parametrize("dtype", TYPES)


def normal(shape: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


@every_type
@pytest.mark.parametrize("size", [1, 17, 4096, 5001])
@pytest.mark.parametrize("shift", [0, 1])
def test_gelu_has_the_cpus_bits(
    machine: Emulator, place: Place, dtype: str, size: int, shift: int
) -> None:
    x, dy = place(3 * normal(size, dtype)), place(normal(size, dtype, 1), shift)
    y, dx = place(np.zeros_like(x), shift), place(np.zeros_like(x))
    gpu_tokens.gelu(machine, x, y)
    gpu_tokens.gelu_backward(machine, dy, x, dx)
    wide = grid.wide(dtype)
    exact, exact_dy = x.astype(wide), dy.astype(wide)
    want = np.empty_like(exact)
    tokens.gelu(exact, want)
    assert_same_bits(y, as_array(want, x.dtype))
    tokens.gelu_backward(exact_dy, exact, want)
    assert_same_bits(dx, as_array(want, x.dtype))


@every_type
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_and_its_gradients(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int]
) -> None:
    x, dy = place(normal(shape, dtype) + TYPES[dtype].type(2)), place(normal(shape, dtype, 1))
    wide = grid.wide(dtype).name
    scale, offset = (place(normal(shape[1], wide, seed)) for seed in (2, 3))
    y, dx = place(np.zeros_like(x)), place(np.zeros_like(x))
    dscale, doffset = (place(np.zeros_like(scale)) for _ in range(2))
    gpu_tokens.layer_norm(machine, x, scale, offset, EPSILON, y)
    gpu_tokens.layer_norm_backward(machine, dy, x, scale, EPSILON, dx, dscale, doffset)

    exact_dy, exact_x, exact_scale, exact_offset = (
        each.astype(np.float64) for each in (dy, x, scale, offset)
    )
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * 10}
    want = plain.layer_norm(exact_x, exact_scale, exact_offset, EPSILON)
    np.testing.assert_allclose(y.astype(np.float64), want, **close)
    want, *sums = plain.layer_norm_backward(exact_dy, exact_x, exact_scale, EPSILON)
    np.testing.assert_allclose(dx.astype(np.float64), want, **close)
    # These are of the type that is computed with, whatever x is.
    tight = 1e-12 if dtype == "float64" else 3e-4
    np.testing.assert_allclose(dscale, sums[0], rtol=tight, atol=tight)
    np.testing.assert_allclose(doffset, sums[1], rtol=tight, atol=tight)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_softmax_over_what_a_token_sees(
    machine: Emulator, place: Place, dtype: str, tokens: int
) -> None:
    given = normal((3, tokens, tokens), dtype)
    scores, gradients = place(given), place(normal(given.shape, dtype, 1))
    gpu_attention.causal_softmax(machine, scores, 0.3)
    p, dp = plain.causal_softmax(given.astype(np.float64) * 0.3), gradients.astype(np.float64)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(scores, p, **close)
    gpu_attention.causal_softmax_backward(machine, scores, gradients, 0.3)
    want = p * (dp - (p * dp).sum(axis=2, keepdims=True)) * 0.3
    np.testing.assert_allclose(gradients, want, **close)


def test_the_same_bits_in_every_order(libraries: Path) -> None:
    x, dy, scale = (normal(shape, "float32") for shape in ((300, 8), (300, 8), 8))
    results = []
    for order in ORDERS:
        dx, dscale, doffset = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
        machine = Emulator(libraries, order)
        gpu_tokens.layer_norm_backward(machine, dy, x, scale, EPSILON, dx, dscale, doffset)
        results.append((dx, dscale, doffset))
    for found in results[1:]:
        for got, want in zip(found, results[0], strict=True):
            assert_same_bits(got, want)


def test_of_nothing_there_is_nothing_to_do(machine: Emulator) -> None:
    x, scale, dscale, doffset = np.zeros((0, 3)), *np.ones((3, 3))
    gpu_tokens.gelu(machine, x, x)
    gpu_tokens.layer_norm(machine, x, scale, scale, EPSILON, x)
    gpu_attention.causal_softmax(machine, np.zeros((0, 4, 4)), 1.0)
    assert machine.launches == []
    gpu_tokens.layer_norm_backward(machine, x, x, scale, EPSILON, x, dscale, doffset)
    assert dscale.tolist() == doffset.tolist() == [0.0] * 3


def test_errors_name_the_array(machine: Emulator) -> None:
    x, scale = np.zeros((4, 3), np.float16), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="layer_norm: offset must be float32, got float16"):
        gpu_tokens.layer_norm(machine, x, scale, x[0], EPSILON, x)
    with pytest.raises(ValueError, match="gelu_backward: x must have 12 elements"):
        gpu_tokens.gelu_backward(machine, x, x[:2], x)
    scores = np.zeros((2, 4, 4), np.float32)
    with pytest.raises(ValueError, match="causal_softmax_backward: gradients must have 32"):
        gpu_attention.causal_softmax_backward(machine, scores, scores[:1], 1.0)
