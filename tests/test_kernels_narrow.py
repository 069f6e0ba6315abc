"""float16 and bfloat16: casts and sums, bit for bit against NumPy's and ml_dtypes' own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minidist.kernels import plain, reduce

NARROW = [np.float16, ml_dtypes.bfloat16]
SIZES = [0, 1, 15, 17, 4099, 300007]


def cast(x: np.ndarray, dtype: Any, threads: int = 1) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    reduce.cast([out], [x], threads=threads)
    return out


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Every bit the same, but for those that tell one NaN from another."""
    bits = {2: np.uint16, 4: np.uint32}[want.itemsize]
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


def every(dtype: Any) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_is_widened_exactly_and_comes_back(dtype: Any) -> None:
    with np.errstate(invalid="ignore"):
        want = every(dtype).astype(np.float32)
    wide = cast(every(dtype), np.float32)
    assert_same_bits(wide, want)
    assert_same_bits(cast(wide, dtype), every(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_at_every_halfway_point_and_beside_it(dtype: Any) -> None:
    # Between neighbours a and b of 16 bits lies (a + b)/2, exact in float32, where rounding turns.
    ups = every(dtype).astype(np.float32)
    ups = np.unique(ups[np.isfinite(ups)])
    with np.errstate(over="ignore"):
        halfway = ((ups[1:].astype(np.float64) + ups[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([halfway, ups, np.float32([65519.996, 65520.0, 65520.004, 3.4e38])])
    x = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)])
    x = x.astype(np.float32)
    assert_same_bits(cast(np.concatenate([x, -x]), dtype), plain.narrow(np.append(x, -x), dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_of_any_bits(dtype: Any) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 300007, dtype=np.uint32)
    x = words.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = plain.narrow(x, dtype)
    assert_same_bits(cast(x, dtype), want)
    assert_same_bits(cast(x, dtype, threads=3), want)


@pytest.mark.parametrize("dtype", NARROW)
def test_nan_stays_nan_with_its_sign_whatever_else_it_says(dtype: Any) -> None:
    payloads = np.uint32([0x7F800001, 0x7F801000, 0x7FC00000, 0x7FFFFFFF])
    x = np.append(payloads, payloads | np.uint32(1 << 31)).view(np.float32)
    got = cast(x, dtype)
    assert np.isnan(got.astype(np.float32)).all()
    np.testing.assert_array_equal(got.view(np.uint16) >> 15, [0] * 4 + [1] * 4)
    assert np.isnan(cast(got, np.float32)).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_lists_of_tensors_are_cast_each_into_its_own(dtype: Any, threads: int) -> None:
    random = np.random.default_rng(1)
    tensors = [random.standard_normal(size).astype(np.float32) for size in SIZES]
    small = [np.zeros(size, dtype) for size in SIZES]
    reduce.cast(small, tensors, threads=threads)
    back = [np.zeros(size, np.float32) for size in SIZES]
    reduce.cast(back, small, threads=threads)
    for x, narrow, wide in zip(tensors, small, back, strict=True):
        assert_same_bits(narrow, x.astype(dtype))
        assert_same_bits(wide, x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("to", ["narrow", "float32"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_taken_in_float32_and_rounded_once(
    dtype: Any, to: str, count: int, weighted: bool
) -> None:
    random = np.random.default_rng(count)
    sources = [[random.standard_normal(n).astype(dtype) for n in SIZES] for _ in range(count)]
    weights = [float(3 * r + 1) for r in range(count)] if weighted else [1.0] * count
    scale = 1 / 7 if weighted else 1.0
    into = dtype if to == "narrow" else np.float32
    for threads in (1, 2):
        out = [[np.empty(n, into) for n in SIZES] for _ in range(2)]
        reduce.sum(
            out, sources, weights=weights if weighted else None, scale=scale, threads=threads
        )
        for t in range(len(SIZES)):
            want = plain.narrow_sum([s[t] for s in sources], weights, scale, into)
            for destination in out:
                assert_same_bits(destination[t], want)
    if to == "narrow":
        reduce.sum(sources, sources, weights=weights if weighted else None, scale=scale)
        for source in sources:
            for got, want in zip(source, out[0], strict=True):
                assert_same_bits(got, want)


def test_a_sum_of_what_float16_cannot_tell_apart() -> None:
    # 2048 + 1 is no float16, but it is a float32, and so 2048 + 1 + 1 is 2050.
    parts = [[np.float16([x])] for x in (2048, 1, 1)]
    out = np.zeros(1, np.float16)
    reduce.sum([[out]], parts)
    assert out[0] == 2050


@pytest.mark.parametrize(
    ("to", "given", "words"),
    [
        (np.float32, np.float32, "from float32 to float32, but one"),
        (np.float16, np.float64, "from float64 to float16, but one"),
        (np.float16, ml_dtypes.bfloat16, "from bfloat16 to float16, but one"),
        (np.float32, np.int16, r"sources\[0\] must be .* float64, got int16 of shape"),
        (np.uint16, np.float32, r"destinations\[0\] must be .* float64, got uint16 of shape"),
    ],
)
def test_what_cannot_be_cast(to: Any, given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"cast: {words}"):
        reduce.cast([np.zeros(2, to)], [np.zeros(2, given)])


def test_errors_name_the_array() -> None:
    x, y = np.zeros(2, np.float32), np.zeros(2, np.float16)
    with pytest.raises(TypeError, match=r"sources\[1\] must be a NumPy array of float16, got"):
        reduce.cast([x, x], [y, x])
    with pytest.raises(ValueError, match=r"sources\[0\] must have 2 elements"):
        reduce.cast([x], [np.zeros(3, np.float16)])
    with pytest.raises(ValueError, match="destinations has 1 tensors, but sources has 0"):
        reduce.cast([x], [])
    with pytest.raises(TypeError, match="destinations of float16 do not take sums of float32"):
        reduce.sum([[y]], [[x]])
    with pytest.raises(TypeError, match=r"sources\[1\]\[0\] must be .* of bfloat16, got float16"):
        reduce.sum([[x]], [[x.astype(ml_dtypes.bfloat16)], [y]])
    reduce.cast([], [])
