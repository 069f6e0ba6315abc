"""bias.cu, run thread by thread on the CPU, against plain.py and float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulator import ORDERS, TYPES, Emulator, assert_same_bits

from minidist.dtypes import as_array
from minidist.kernels import gpu_bias, grid, plain

SHAPES = [(1, 1), (5, 3), (300, 8), (513, 64), (9, 600)]
Place = Callable[..., np.ndarray]

every_type = pytest.mark.parametrize("dtype", TYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES)
relu_or_not = pytest.mark.parametrize("relu", [False, True])


def normal(shape: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def exact(x: np.ndarray) -> np.ndarray:
    """What is narrow in float32, else the same."""
    return x.astype(np.float32) if x.itemsize == 2 else x


@every_type
@every_shape
@relu_or_not
@pytest.mark.parametrize("shift", [0, 1])
def test_a_bias_and_its_relu(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int], relu: bool, shift: int
) -> None:
    x, bias = place(normal(shape, dtype), shift), place(normal(shape[1], dtype, 1))
    x[0, 0] = np.nan
    want = exact(x) + exact(bias)
    want = as_array(plain.relu(want) if relu else want, x.dtype)
    y = place(np.zeros_like(x))
    gpu_bias.bias(machine, x, bias, y, relu=relu)
    assert_same_bits(y, want)
    gpu_bias.bias(machine, x, bias, x, relu=relu)
    assert_same_bits(x, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_shape
def test_what_is_wide_is_rounded_once(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int]
) -> None:
    x, bias = place(normal(shape, "float32")), place(normal(shape[1], dtype, 1))
    y = place(np.zeros(shape, TYPES[dtype]))
    gpu_bias.bias(machine, x, bias, y, relu=True)
    assert_same_bits(y, as_array(plain.relu(x + exact(bias)), y.dtype))


@every_type
@every_shape
@relu_or_not
@pytest.mark.parametrize("kept", [False, True])
def test_its_gradients(
    machine: Emulator, place: Place, dtype: str, shape: tuple[int, int], relu: bool, kept: bool
) -> None:
    dy, y = place(normal(shape, dtype)), place(normal(shape, dtype, 1)) if relu else None
    dbias = place(np.zeros(shape[1], dy.dtype))
    dz = place(np.zeros_like(dy)) if kept else None
    gpu_bias.bias_backward(machine, dy, dbias, y, dz)
    want = dy if y is None else plain.relu_backward(dy, y)
    if dz is not None:
        assert_same_bits(dz, want)
    sums = want.astype(np.float64).sum(axis=0)
    bound = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(dbias.astype(np.float64), sums, rtol=bound, atol=bound * 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(300, 8), (70, 40), (40, 5)])
def test_the_same_bits_in_every_order(libraries: Path, dtype: str, shape: tuple[int, int]) -> None:
    dy, results = normal(shape, dtype), []
    for order in ORDERS:
        dbias = np.zeros(shape[1], dy.dtype)
        gpu_bias.bias_backward(Emulator(libraries, order), dy, dbias, np.abs(dy))
        results.append(dbias)
    for dbias in results[1:]:
        assert_same_bits(dbias, results[0])


def test_of_nothing_the_sum_is_0(machine: Emulator) -> None:
    x, dbias = np.zeros((0, 3)), np.ones(3)
    gpu_bias.bias(machine, x, dbias, x)
    gpu_bias.bias_backward(machine, x, dbias)
    assert dbias.tolist() == [0.0] * 3
    gpu_bias.bias_backward(machine, np.zeros((3, 0)), np.zeros(0))


def test_errors_name_the_array(machine: Emulator) -> None:
    x, bias = np.zeros((4, 3), np.float16), np.zeros(3, np.float16)
    with pytest.raises(ValueError, match="bias: bias must have 3 elements"):
        gpu_bias.bias(machine, x, bias[:2], x)
    with pytest.raises(TypeError, match="bias: x must be float32, got float64"):
        gpu_bias.bias(machine, np.zeros((4, 3)), bias, x)
    with pytest.raises(TypeError, match="bias_backward: dbias must be float16, got float32"):
        gpu_bias.bias_backward(machine, x, np.zeros(3, np.float32))
    assert grid.wide("float16") == np.float32
