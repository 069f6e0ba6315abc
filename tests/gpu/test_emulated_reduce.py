"""reduce.cu, run thread by thread on the CPU, gives the bits of plain.py and of reduce.pyx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator import TYPES, Emulator, assert_same_bits

from minidist.dtypes import as_array
from minidist.kernels import gpu_reduce, grid, plain, reduce

SIZES = [0, 1, 15, 4096, 17, 9001]
Place = Callable[..., np.ndarray]


def tensors(seed: int, dtype: str, sizes: list[int] = SIZES) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(n).astype(TYPES[dtype]) for n in sizes]


@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        *((dtype, dtype) for dtype in TYPES),
        ("float16", "float32"),
        ("bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2, 6])
@pytest.mark.parametrize("shift", [0, 1])
def test_sums_in_replica_order(
    machine: Emulator, place: Place, dtype: str, to: str, replicas: int, shift: int
) -> None:
    sources = [tensors(r, dtype) for r in range(replicas)]
    weights, scale = [1 + 0.3 * r for r in range(replicas)], 1 / 7
    wide = np.float64 if dtype == "float64" else np.float32
    want = []
    for rows in zip(*sources, strict=True):
        total = plain.sum([x.astype(wide) for x in rows], [*map(wide, weights)], wide(scale))
        want.append(as_array(total, TYPES[to]))

    laid = [[place(x, shift * (r + 1)) for x in row] for r, row in enumerate(sources)]
    into = [[place(np.zeros_like(x, TYPES[to]), shift * d) for x in laid[0]] for d in range(3)]
    if to == dtype:
        into.append(laid[-1])
    gpu_reduce.sum(machine, into, laid, weights=weights, scale=scale)
    for destination in into:
        for got, expected in zip(destination, want, strict=True):
            assert_same_bits(got, expected)
    assert machine.launches == ["sum"]


def test_without_weights_it_is_the_cpus_sum(machine: Emulator) -> None:
    sources = [tensors(r, "float32") for r in range(3)]
    want, got = ([np.empty_like(x) for x in sources[0]] for _ in range(2))
    reduce.sum([want], sources)
    gpu_reduce.sum(machine, [got], sources)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def some_numbers(dtype: str) -> np.ndarray:
    """All there are of 16 bits; of the others many, of all sizes and beside halfway points."""
    if TYPES[dtype].itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(TYPES[dtype])
    random = np.random.default_rng(0)
    words = np.arange(1 << 16, dtype=np.uint16)[::7]
    extremes = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-300, 65519.999, 65520, 3.4e38]
    numbers = [np.array(extremes), random.standard_normal(1000) * 2.0 ** np.arange(-500, 500) / 4]
    with np.errstate(over="ignore", invalid="ignore"):
        for narrow in ("float16", "bfloat16"):
            exact = words.view(TYPES[narrow]).astype(np.float64)
            numbers += [exact * (1 + 2.0**-k) for k in (8, 9, 11, 12, 24, 25, 40)]
        return np.concatenate(numbers).astype(TYPES[dtype])


@pytest.mark.parametrize(
    ("dtype", "to"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float64", "float16"),
        ("float64", "bfloat16"),
        ("float32", "float64"),
        ("float64", "float32"),
        ("float16", "bfloat16"),
    ],
)
def test_casts_round_once(machine: Emulator, place: Place, dtype: str, to: str) -> None:
    numbers = [some_numbers(dtype), tensors(1, dtype, [1001])[0]]
    with np.errstate(over="ignore", invalid="ignore"):
        want = [as_array(x, TYPES[to]) for x in numbers]
    got = [place(np.zeros_like(x), shift) for x, shift in zip(want, (0, 1), strict=True)]
    gpu_reduce.cast(machine, got, [place(x) for x in numbers])
    for one, expected in zip(got, want, strict=True):
        assert_same_bits(one, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_packs_and_unpacks(machine: Emulator, place: Place, dtype: str) -> None:
    given = tensors(0, dtype)
    offsets, total = reduce.offsets([x.shape for x in given], TYPES[dtype].itemsize)
    offsets = [offset + 3 * (i == 1) for i, offset in enumerate(offsets)]
    flat = place(np.full(total, 7, TYPES[dtype]))
    gpu_reduce.pack(machine, flat, given, offsets)
    want = np.full(total, 7, TYPES[dtype])
    for x, offset in zip(given, offsets, strict=True):
        want[offset : offset + x.size] = x
    assert_same_bits(flat, want)
    back = [place(np.zeros_like(x), 1) for x in given]
    gpu_reduce.unpack(machine, back, flat, offsets)
    for one, expected in zip(back, given, strict=True):
        assert_same_bits(one, expected)
    with pytest.raises(ValueError, match=r"pack: tensors\[5\] of 9001 elements at offset -1"):
        gpu_reduce.pack(machine, flat, given, [*offsets[:-1], -1])


@pytest.mark.parametrize("dtype", TYPES)
def test_finds_the_first_that_is_not_finite(each_order: Emulator, dtype: str) -> None:
    given = tensors(0, dtype)
    assert gpu_reduce.first_nonfinite(each_order, given).tolist() == [len(SIZES)]
    for row, at, what in ((5, 9000, np.nan), (5, 17, np.inf), (3, 4095, -np.inf), (1, 0, np.nan)):
        given[row][at] = what
        assert gpu_reduce.first_nonfinite(each_order, given).tolist() == [row]
    assert gpu_reduce.first_nonfinite(each_order, []).tolist() == [0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("most", [1, 1 << 15])
def test_sums_of_squares_have_the_cpus_bits(
    each_order: Emulator, dtype: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BLOCKS", most)
    given = tensors(0, dtype, [70001, *SIZES])
    exact: list[Any] = [x if x.itemsize > 2 else x.astype(np.float32) for x in given]
    got = gpu_reduce.sum_squares(each_order, given)
    assert got.tolist() == [reduce.sum_squares(exact)]
    assert each_order.launches == ["square_chunks", "add_in_order"]
    assert gpu_reduce.sum_squares(each_order, given[1:2]).tolist() == [0.0]


def test_many_chunks_are_added_in_order(machine: Emulator) -> None:
    # More sums than one pass of add_in_order fetches.
    given = [np.float32([i % 7 + 0.1]) for i in range(5000)]
    assert gpu_reduce.sum_squares(machine, given).tolist() == [reduce.sum_squares(given)]


def test_errors_of_sums(machine: Emulator) -> None:
    x, y = np.zeros(2, np.float32), np.zeros(2, np.float16)
    with pytest.raises(TypeError, match="destinations of float16 do not take sums of float32"):
        gpu_reduce.sum(machine, [[y]], [[x]])
    with pytest.raises(ValueError, match="sum: 1 weights for 2 sources"):
        gpu_reduce.sum(machine, [[x]], [[x], [x]], weights=[1.0])
    with pytest.raises(ValueError, match="needs a destination and a source, got 0 destinations"):
        gpu_reduce.sum(machine, [], [[x]])
    with pytest.raises(TypeError, match=r"sources\[1\]\[0\] must be float32, got float16"):
        gpu_reduce.sum(machine, [[x]], [[x], [y]])
