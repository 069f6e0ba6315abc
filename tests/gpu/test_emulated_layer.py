"""layer.cu and random.cu, run thread by thread on the CPU, against plain.py and layer.pyx."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emulator import TYPES, Emulator, assert_same_bits

from minidist.dtypes import as_array
from minidist.kernels import gpu_layer, grid, layer, plain

SIZES = [1, 15, 17, 4096, 9001]
KEY, COUNTER = (0xDEADBEEF, 42), (7, 0, 0xFFFFFFFF)
Place = Callable[..., np.ndarray]

every_type = pytest.mark.parametrize("dtype", TYPES)
every_size = pytest.mark.parametrize("size", SIZES)


def normal(shape: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def exact(x: np.ndarray) -> np.ndarray:
    """What is narrow in float32, else the same."""
    return x.astype(np.float32) if x.itemsize == 2 else x


# -- element by element ----------------------------------------------------------------------


@every_type
@every_size
@pytest.mark.parametrize("shift", [0, 1])
def test_relu_and_its_derivative(
    machine: Emulator, place: Place, dtype: str, size: int, shift: int
) -> None:
    x, dy = place(normal(size, dtype)), place(normal(size, dtype, 1), shift)
    x[0] = np.nan
    y, dx = place(np.zeros_like(x), shift), place(np.zeros_like(x))
    gpu_layer.relu(machine, x, y)
    gpu_layer.relu_backward(machine, dy, y, dx)
    assert_same_bits(y, as_array(plain.relu(exact(x)), x.dtype))
    assert_same_bits(dx, as_array(plain.relu_backward(exact(dy), exact(y)), x.dtype))
    gpu_layer.relu(machine, x, x)
    assert_same_bits(x, y)

    x = place(normal(size, dtype) * 6, shift).astype(TYPES[dtype])
    gpu_layer.relu6(machine, x, y)
    gpu_layer.relu6_backward(machine, dy, y, dx)
    assert_same_bits(y, as_array(plain.relu6(exact(x)), x.dtype))
    assert_same_bits(dx, as_array(plain.relu6_backward(exact(dy), exact(y)), x.dtype))


@every_type
@every_size
@pytest.mark.parametrize("shift", [0, 1])
def test_dropout_drops_what_the_cpu_drops(
    machine: Emulator, place: Place, dtype: str, size: int, shift: int
) -> None:
    x = place(normal(size, dtype), shift)
    y = place(np.zeros_like(x), shift)
    gpu_layer.dropout(machine, x, y, 0.3, KEY, COUNTER)
    assert_same_bits(y, as_array(plain.dropout(exact(x), 0.3, KEY, COUNTER), x.dtype))


@every_size
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_numbers_are_the_cpus(
    machine: Emulator, place: Place, dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BLOCKS", 2)
    out = place(np.zeros(size, dtype))
    gpu_layer.uniform(machine, out, KEY, COUNTER)
    assert_same_bits(out, plain.uniform(size, dtype, KEY, COUNTER))


def test_nothing_is_launched_for_nothing(machine: Emulator) -> None:
    empty, none = np.zeros((0, 3)), np.zeros(0, np.int64)
    gpu_layer.relu(machine, empty, empty)
    gpu_layer.dropout(machine, empty, empty, 0.5, KEY, COUNTER)
    gpu_layer.uniform(machine, empty, KEY, COUNTER)
    gpu_layer.softmax(machine, empty, empty)
    gpu_layer.softmax(machine, np.zeros((2, 0)), np.zeros((2, 0)))
    gpu_layer.softmax_cross_entropy(machine, empty, none, np.zeros(0), empty)
    gpu_layer.scatter_add(machine, np.zeros((2, 3)), none, none, empty)
    assert machine.launches == []


def test_errors_name_the_array(machine: Emulator) -> None:
    x = np.zeros(4)
    with pytest.raises(ValueError, match="relu: y must have 4 elements"):
        gpu_layer.relu(machine, x, np.zeros(3))
    with pytest.raises(TypeError, match="relu: y must be float64, got float32"):
        gpu_layer.relu(machine, x, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="rate must be at least 0 and below 1, got 1"):
        gpu_layer.dropout(machine, x, x, 1.0, KEY, COUNTER)
    with pytest.raises(ValueError, match="key must be 2 words of 32 bits"):
        gpu_layer.uniform(machine, x, (1, 2, 3), COUNTER)
    square, labels, none = x.reshape(2, 2), np.zeros(2, np.int64), np.zeros((2, 0))
    with pytest.raises(TypeError, match="labels must be int64, got int32"):
        gpu_layer.softmax_cross_entropy(machine, square, np.int32([0, 1]), x[:2], square)
    with pytest.raises(ValueError, match="2 examples, but no classes"):
        gpu_layer.softmax_cross_entropy(machine, none, labels, x[:2], none)


# -- softmax ---------------------------------------------------------------------------------


def tolerance(dtype: str) -> float:
    return {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]


@every_type
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (9, 32), (8, 33), (2, 1000)])
def test_softmax_and_its_cross_entropy(
    each_order: Emulator, place: Place, dtype: str, shape: tuple[int, int]
) -> None:
    logits = place(normal(shape, dtype) * TYPES[dtype].type(5))
    labels = np.random.default_rng(1).integers(0, shape[1], shape[0])
    losses, d = place(np.zeros(shape[0], logits.dtype)), place(np.zeros_like(logits))
    gpu_layer.softmax_cross_entropy(each_order, logits, labels, losses, d)
    want_losses, want = plain.softmax_cross_entropy(logits.astype(np.float64), labels)
    close = {"rtol": tolerance(dtype), "atol": tolerance(dtype)}
    np.testing.assert_allclose(losses.astype(np.float64), want_losses, **close)
    np.testing.assert_allclose(d.astype(np.float64), want, **close)

    y, log = place(np.zeros_like(logits)), place(np.zeros_like(logits))
    gpu_layer.softmax(each_order, logits, y)
    gpu_layer.log_softmax(each_order, logits, log)
    want = plain.log_softmax(logits.astype(np.float64))
    np.testing.assert_allclose(y.astype(np.float64), np.exp(want), **close)
    np.testing.assert_allclose(log.astype(np.float64), want, **close)

    gpu_layer.softmax_cross_entropy(each_order, logits, labels, losses, logits)
    assert_same_bits(logits, d)


def test_softmax_is_the_same_in_every_order(libraries: object, place: Place) -> None:
    x = normal((5, 100), "float32")
    results = []
    for order in ("forwards", "backwards", "shuffled"):
        machine, y = Emulator(libraries, order), np.zeros_like(x)  # type: ignore[arg-type]
        gpu_layer.softmax(machine, x, y)
        results.append(y)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_of_one_class_has_the_cpus_bits(machine: Emulator, dtype: str) -> None:
    # With one number there is but one order of adding: log(1) = 0 and e^0 / 1 - 1 = 0.
    logits, labels = normal((7, 1), dtype), np.zeros(7, np.int64)
    losses, d = np.ones(7, dtype), np.ones((7, 1), dtype)
    gpu_layer.softmax_cross_entropy(machine, logits, labels, losses, d)
    assert losses.tolist() == [0.0] * 7 and d.ravel().tolist() == [0.0] * 7


def test_what_is_no_number_shows_in_the_loss(each_order: Emulator) -> None:
    logits = np.zeros((6, 40))
    logits[0, 0] = logits[1, 39] = np.nan
    logits[2, 5] = np.inf
    logits[3, 5] = -np.inf
    labels = np.array([1, 1, 1, 1, 40, -1])
    losses, d = np.zeros(6), np.zeros_like(logits)
    gpu_layer.softmax_cross_entropy(each_order, logits, labels, losses, d)
    assert np.isnan(losses).tolist() == [True, True, True, False, True, True]
    assert losses[3] == pytest.approx(np.log(39))
    want, dwant = np.zeros(4), np.zeros((4, 40))
    layer.softmax_cross_entropy(logits[:4].copy(), labels[:4], want, dwant)
    np.testing.assert_array_equal(np.isnan(losses[:4]), np.isnan(want))
    np.testing.assert_array_equal(np.isnan(d[:4]), np.isnan(dwant))


# -- rows ------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("width", [1, 3, 64])
def test_rows_are_added_in_their_order(
    each_order: Emulator, place: Place, dtype: str, width: int
) -> None:
    indices = np.array([3, 0, 3, 3, 9, 0, 7])
    rows, a = place(normal((7, width), dtype)), place(normal((10, width), dtype, 1))
    want = plain.scatter_add(exact(a), indices, exact(rows))
    order = np.argsort(indices, kind="stable")
    gpu_layer.scatter_add(each_order, a, indices[order], order, rows)
    assert_same_bits(a, as_array(want, a.dtype))
