"""norm.cu, run thread by thread on the CPU, against float64 and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulator import ORDERS, TYPES, Emulator, assert_same_bits

from minidist.kernels import gpu_norm, grid, plain

SHAPES = [(1, 1), (5, 3), (100, 1), (300, 8), (513, 64), (70, 40), (9, 600)]
EPSILON = 1e-3
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
Place = Callable[..., np.ndarray]

every_type = pytest.mark.parametrize("dtype", TYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES)


def normal(shape: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def vectors(dtype: str, columns: int, count: int) -> list[np.ndarray]:
    wide = grid.wide(dtype).name
    return [normal(columns, wide, 10 + i) for i in range(count)]


@every_type
@every_shape
def test_moments_far_from_zero(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int]
) -> None:
    x = place(normal(shape, dtype) + TYPES[dtype].type(30))
    mean, variance = (place(v) for v in vectors(dtype, shape[1], 2))
    gpu_norm.moments(machine, x, mean, variance)
    wanted = plain.moments(x.astype(np.float64))
    tolerance = 1e-13 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(mean, wanted[0], rtol=tolerance)
    np.testing.assert_allclose(variance, wanted[1], rtol=100 * tolerance, atol=tolerance)


@every_type
@every_shape
@pytest.mark.parametrize("moments", [True, False])
def test_normalize_and_its_gradients(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int], moments: bool
) -> None:
    x, dy = place(normal(shape, dtype)), place(normal(shape, dtype, 1))
    mean, scale, offset = vectors(dtype, shape[1], 3)
    variance = np.abs(vectors(dtype, shape[1], 4)[3]) + mean.dtype.type(0.1)
    y, dx = place(np.zeros_like(x)), place(np.zeros_like(x))
    gpu_norm.normalize(machine, x, mean, variance, scale, offset, EPSILON, y)
    dscale, doffset = (place(np.zeros_like(scale)) for _ in range(2))
    gpu_norm.normalize_backward(
        machine, dy, x, mean, variance, scale, EPSILON, moments, dx, dscale, doffset
    )

    given = [x, dy, mean, variance, scale, offset]
    exact_x, exact_dy, *exact = (v.astype(np.float64) for v in given)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * 10}
    want = plain.normalize(exact_x, *exact, EPSILON)
    np.testing.assert_allclose(y.astype(np.float64), want, **close)
    want, *sums = plain.normalize_backward(exact_dy, exact_x, *exact[:3], EPSILON, moments)
    np.testing.assert_allclose(dx.astype(np.float64), want, **close)
    # These are of the type that is computed with, whatever x is.
    tight = 1e-12 if dtype == "float64" else 3e-4
    np.testing.assert_allclose(dscale, sums[0], rtol=tight, atol=tight)
    np.testing.assert_allclose(doffset, sums[1], rtol=tight, atol=tight)


@every_type
@every_shape
@pytest.mark.parametrize("added", [False, True])
def test_what_is_added_and_the_relu(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int], added: bool
) -> None:
    x, dy = place(normal(shape, dtype)), place(normal(shape, dtype, 1))
    add = place(normal(shape, dtype, 2)) if added else None
    mean, scale, offset = vectors(dtype, shape[1], 3)
    variance = np.abs(vectors(dtype, shape[1], 4)[3]) + mean.dtype.type(0.1)
    columns = [mean, variance, scale, offset]
    y, dx, dz = (place(np.zeros_like(x)) for _ in range(3))
    gpu_norm.normalize(machine, x, *columns, EPSILON, y, add, True)
    exact = [v.astype(np.float64) for v in columns]
    want = plain.normalize(x.astype(np.float64), *exact, EPSILON)
    want = plain.relu(want if add is None else want + add.astype(np.float64))
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * 10}
    np.testing.assert_allclose(y.astype(np.float64), want, **close)

    # What the ReLU holds back counts nowhere: all gradients are those of dz alone.
    sums = [place(np.zeros_like(scale)) for _ in range(2)]
    given = (x, mean, variance, scale, EPSILON, True)
    gpu_norm.normalize_backward(machine, dy, *given, dx, *sums, y, dz if added else None)
    masked = plain.relu_backward(dy, y)
    if added:
        assert_same_bits(dz, masked)
    again, others = np.zeros_like(dx), [np.zeros_like(scale) for _ in range(2)]
    gpu_norm.normalize_backward(machine, masked, *given, again, *others)
    for one, other in zip([dx, *sums], [again, *others], strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(300, 8), (70, 40), (40, 5)])
def test_the_same_bits_in_every_order(libraries: Path, dtype: str, shape: tuple[int, int]) -> None:
    x, results = normal(shape, dtype), []
    for order in ORDERS:
        mean, variance = vectors(dtype, shape[1], 2)
        gpu_norm.moments(Emulator(libraries, order), x, mean, variance)
        results.append((mean, variance))
    for mean, variance in results[1:]:
        assert_same_bits(mean, results[0][0])
        assert_same_bits(variance, results[0][1])


@every_type
def test_alignment_changes_no_result_of_single_elements(
    machine: Emulator, place: Place, dtype: str
) -> None:
    x, columns = normal((50, 16), dtype), vectors(dtype, 16, 4)
    columns[1] = np.abs(columns[1])
    aligned, shifted = place(np.zeros_like(x)), place(np.zeros_like(x), 1)
    gpu_norm.normalize(machine, place(x), *columns, EPSILON, aligned)
    gpu_norm.normalize(machine, place(x, 1), *columns, EPSILON, shifted)
    assert_same_bits(aligned, shifted)


@every_type
def test_a_constant_has_no_variance(machine: Emulator, dtype: str) -> None:
    x = np.full((700, 8), TYPES[dtype].type(1000.1))
    mean, variance = vectors(dtype, 8, 2)
    gpu_norm.moments(machine, x, mean, variance)
    assert mean.tolist() == x[0].astype(mean.dtype).tolist()
    assert variance.tolist() == [0.0] * 8


def test_nothing_has_moments_of_zero(machine: Emulator) -> None:
    x = np.zeros((0, 3))
    mean, variance, dscale, doffset = np.ones((4, 3))
    gpu_norm.moments(machine, x, mean, variance)
    assert mean.tolist() == variance.tolist() == [0.0] * 3
    gpu_norm.normalize(machine, x, mean, variance, mean, mean, EPSILON, x)
    gpu_norm.normalize_backward(
        machine, x, x, mean, variance, mean, EPSILON, True, x, dscale, doffset
    )
    assert dscale.tolist() == doffset.tolist() == [0.0] * 3


def test_errors_name_the_array(machine: Emulator) -> None:
    x, mean = np.zeros((4, 3), np.float16), np.zeros(3, np.float32)
    with pytest.raises(TypeError, match="moments: variance must be float32, got float16"):
        gpu_norm.moments(machine, x, mean, x[0])
    with pytest.raises(ValueError, match="normalize: offset must have 3 elements"):
        gpu_norm.normalize(machine, x, mean, mean, mean, mean[:2], EPSILON, x)
