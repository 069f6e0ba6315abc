"""What the tests of float16 and bfloat16 share: an oracle of rounding, and some numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from minidist import ops
from minidist.tape import GradientTape

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # between 1 and the next number

narrow = st.sampled_from(sorted(DTYPES))


def grid(dtype: str) -> np.ndarray:
    """All finite numbers from 0 up, in order, as float64: the n-th has the bits n."""
    bits = np.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=np.uint16)
    return bits.view(DTYPES[dtype]).astype(np.float64)


def nearest(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of what lies nearest to each value, by a search in the grid.

    Of two equally near ones it is the one with even bits. What is at least half a step above the
    greatest number is infinite; all NaNs are one.
    """
    values = np.asarray(values, np.float64)
    numbers = grid(dtype)
    step = numbers[-1] - numbers[-2]
    numbers = np.append(numbers, numbers[-1] + step)  # its bits are those of infinity
    size = np.where(np.isnan(values), 0, np.minimum(np.abs(values), numbers[-1]))
    above = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    low, high = size - numbers[above - 1], numbers[above] - size
    bits = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    bits = bits | np.where(np.signbit(values), 0x8000, 0)
    return np.where(np.isnan(values), NAN, bits)


NAN = 0xFFFF


def bits(array: object) -> np.ndarray:
    """Return the bits of narrow numbers, all NaNs as one."""
    array = np.asarray(array)
    return np.where(np.isnan(array.astype(np.float32)), NAN, array.view(np.uint16))


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.float32).astype(DTYPES[dtype])


def whole(shape: tuple[int, ...], dtype: str, seed: int, most: int = 20) -> np.ndarray:
    """Whole numbers: their products and sums are exact in float32, and not in 16 bits."""
    values = np.random.default_rng(seed).integers(-most, most + 1, shape)
    return values.astype(np.float32).astype(DTYPES[dtype])


def wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def gradients(operation, *inputs, dy=None):
    """Return the result, and the gradients of Σ dy·result; dy is 1 if not given."""
    tensors = [ops.constant(x) for x in inputs]
    with GradientTape() as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = operation(*tensors)
        target = y if dy is None else ops.cast(y, "float32") * dy.astype(np.float32)
    return y, tape.gradient(target, tensors)
