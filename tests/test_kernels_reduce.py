"""Sums over replicas, packing and what is asked of tensors, against NumPy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.kernels import plain, reduce

SIZES = [0, 1, 15, 17, 1000003]
DTYPES = ["float32", "float64"]


def replicas(count: int, dtype: str, sizes: list[int] = SIZES) -> list[list[np.ndarray]]:
    random = np.random.default_rng(count)
    return [[random.standard_normal(size).astype(dtype) for size in sizes] for _ in range(count)]


def empty_like(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return [np.full_like(x, np.nan) for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_sum_equals_its_twin_bit_for_bit(
    dtype: str, count: int, threads: int, weighted: bool
) -> None:
    sources = replicas(count, dtype)
    weights = [float(3 * r + 1) for r in range(count)] if weighted else [1.0] * count
    scale = 1 / 7 if weighted else 1.0
    into = [empty_like(sources[0]), empty_like(sources[0])]
    reduce.sum(into, sources, weights=weights if weighted else None, scale=scale, threads=threads)
    for t in range(len(SIZES)):
        want = plain.sum([s[t] for s in sources], weights, scale)
        for destination in into:
            assert want.dtype == dtype
            np.testing.assert_array_equal(destination[t], want)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_destinations_may_be_the_sources(count: int, threads: int) -> None:
    apart, same = replicas(count, "float32"), replicas(count, "float32")
    into = empty_like(apart[0])
    reduce.sum([into], apart, scale=1 / count)
    reduce.sum(same, same, scale=1 / count, threads=threads)
    for destination in same:
        for got, want in zip(destination, into, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_destination_may_be_any_one_source(place: int) -> None:
    sources = replicas(3, "float64")
    want = [plain.sum([s[t] for s in sources], [1.0] * 3, 1.0) for t in range(len(SIZES))]
    reduce.sum([sources[place]], sources)
    for got, expected in zip(sources[place], want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_order_is_that_of_the_replicas() -> None:
    # In float32 the 1 is lost against 2^25 unless both large numbers come first.
    large, one = np.float32(2**25), np.float32(1)
    for values, want in [([large, -large, one], 1), ([one, large, -large], 0)]:
        out = np.zeros(1, np.float32)
        reduce.sum([[out]], [[np.array([v])] for v in values])
        assert out[0] == want


def test_weighted_mean_of_equal_replicas_is_the_replica() -> None:
    x = np.arange(40.0)
    out = np.empty(40)
    reduce.sum([[out]], [[x], [x], [x]], weights=[1, 2, 5], scale=1 / 8)
    np.testing.assert_array_equal(out, x)


def test_alignment_does_not_matter() -> None:
    sources = [[np.append(np.float32(0), x)[1:] for x in s] for s in replicas(3, "float32")]
    out = empty_like(sources[0])
    reduce.sum([out], sources, threads=2)
    for t, got in enumerate(out):
        np.testing.assert_array_equal(got, plain.sum([s[t] for s in sources], [1.0] * 3, 1.0))


@pytest.mark.parametrize(
    ("destinations", "sources", "weights", "words"),
    [
        ([], [[np.ones(2)]], None, "got 0 destinations and 1 sources"),
        ([[np.ones(2)]], [], None, "got 1 destinations and 0 sources"),
        ([[np.ones(2)]], [[np.ones(2)]], [1, 2], "2 weights for 1 sources"),
        ([[np.ones(2)]], [[np.ones(2)], []], None, r"\[0\] has 1 tensors, but sources\[1\] has 0"),
        ([[np.ones(2)]], [[np.ones(3)]], None, r"sources\[0\]\[0\] must have 2 elements"),
    ],
)
def test_errors_of_sum(destinations: list, sources: list, weights: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reduce.sum(destinations, sources, weights=weights)


def test_source_of_another_dtype() -> None:
    with pytest.raises(TypeError, match=r"sources\[1\]\[0\] must be .* float64, got float32"):
        reduce.sum([[np.ones(2)]], [[np.ones(2)], [np.ones(2, np.float32)]])


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)


@given(shapes, st.sampled_from(DTYPES), st.sampled_from([1, 2]))
def test_unpack_undoes_pack(shapes: list[tuple[int, ...]], dtype: str, threads: int) -> None:
    random = np.random.default_rng(len(shapes))
    tensors = [np.asarray(random.standard_normal(shape), dtype) for shape in shapes]
    starts, total = reduce.offsets(shapes, np.dtype(dtype).itemsize)
    assert all(start * np.dtype(dtype).itemsize % 64 == 0 for start in [*starts, total])
    flat = np.full(total, 7, dtype)
    reduce.pack(flat, tensors, starts, threads=threads)
    covered = np.zeros(total, bool)
    for start, x in zip(starts, tensors, strict=True):
        np.testing.assert_array_equal(flat[start : start + x.size], x.ravel())
        assert not covered[start : start + x.size].any()
        covered[start : start + x.size] = True
    assert (flat[~covered] == 7).all()
    back = [np.zeros_like(x) for x in tensors]
    reduce.unpack(back, flat, starts, threads=threads)
    for x, y in zip(tensors, back, strict=True):
        np.testing.assert_array_equal(x, y)


def test_pack_of_large_tensors_is_shared() -> None:
    tensors = replicas(1, "float32")[0]
    starts, total = reduce.offsets([x.shape for x in tensors], 4)
    packed = []
    for threads in (1, 2, 3):
        packed.append(np.zeros(total, np.float32))
        reduce.pack(packed[-1], tensors, starts, threads=threads)
    np.testing.assert_array_equal(packed[0], packed[1])
    np.testing.assert_array_equal(packed[0], packed[2])


def test_offsets_by_hand() -> None:
    assert reduce.offsets([(3,), (), (16,), (0, 5), (17,)], 4) == ([0, 16, 32, 48, 48], 80)
    assert reduce.offsets([], 8) == ([], 0)
    with pytest.raises(ValueError, match="power of two"):
        reduce.offsets([(1,)], 3)


@pytest.mark.parametrize("offset", [-1, 1, 2**62])
def test_pack_stays_inside_of_flat(offset: int) -> None:
    with pytest.raises(ValueError, match=r"tensors\[0\] of 4 elements .* flat, which has 4"):
        reduce.pack(np.zeros(4), [np.ones(4)], [offset])
    with pytest.raises(ValueError, match=r"tensors\[0\] of 4 elements .* flat, which has 4"):
        reduce.unpack([np.ones(4)], np.zeros(4), [offset])


def test_pack_needs_an_offset_each() -> None:
    with pytest.raises(ValueError, match="1 tensors, but 2 offsets"):
        reduce.pack(np.zeros(4), [np.ones(4)], [0, 1])


def test_alike_is_of_shapes_and_dtypes_number_by_number() -> None:
    def rows(*last: np.ndarray) -> list[list[np.ndarray]]:
        return [[np.zeros((2, 3), np.float32), np.ones(4)], list(last)]

    same = np.empty(24, np.uint8).view(np.dtype("f4").newbyteorder("=")).reshape(2, 3)
    assert reduce.alike(rows(same, np.zeros(4)))
    assert reduce.alike([[], ()])
    assert not reduce.alike(rows(same))
    assert not reduce.alike(rows(same, np.zeros(4), np.zeros(4)))
    assert not reduce.alike(rows(same.reshape(3, 2), np.zeros(4)))
    assert not reduce.alike(rows(same, np.zeros(4, np.int64)))
    assert not reduce.alike(rows(same.astype(">f4"), np.zeros(4)))
    assert not reduce.alike(rows(same, [0.0] * 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("threads", [1, 3])
def test_first_nonfinite_finds_every_place(dtype: str, bad: float, threads: int) -> None:
    tensors = replicas(1, dtype, [17, 0, 1000001, 5])[0]
    tensors[0][:2] = np.finfo(dtype).max, np.finfo(dtype).tiny / 2
    assert reduce.first_nonfinite(tensors, threads=threads) == -1
    for t, at in [(3, 4), (2, 1000000), (2, 0), (0, 16)]:
        tensors[t][at] = bad
        assert reduce.first_nonfinite(tensors, threads=threads) == t
        assert plain.first_nonfinite(tensors) == t
    assert reduce.first_nonfinite([]) == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_is_the_exact_sum_rounded(dtype: str) -> None:
    tensors = replicas(1, dtype, [0, 1, 15, 17, 4096, 4097, 100003])[0]
    exact = math.fsum(float(x) ** 2 for tensor in tensors for x in tensor)
    assert reduce.sum_squares(tensors) == pytest.approx(exact, rel=1e-14)
    assert plain.sum_squares(tensors) == pytest.approx(exact, rel=1e-14)
    assert reduce.sum_squares([]) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_has_the_same_bits_for_any_number_of_threads(dtype: str) -> None:
    tensors = replicas(1, dtype, [1000003, 5, 500009])[0]
    want = reduce.sum_squares(tensors)
    assert {reduce.sum_squares(tensors, threads=threads) for threads in (2, 3, 5)} == {want}
    shifted = [np.append(x.dtype.type(0), x)[1:] for x in tensors]
    assert reduce.sum_squares(shifted, threads=2) == want


def test_sum_squares_of_float32_does_not_overflow_nor_vanish() -> None:
    large, small = np.full(100, 1e30, np.float32), np.full(100, 1e-30, np.float32)
    assert reduce.sum_squares([large]) == pytest.approx(1e62, rel=1e-6)
    assert reduce.sum_squares([small]) == pytest.approx(1e-58, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sum_squares_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    tensors = replicas(1, "float32", [17, 9001])[0]
    tensors[1][9000] = bad
    assert not math.isfinite(reduce.sum_squares(tensors, threads=2))
