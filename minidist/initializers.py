"""Initialisers: what a layer's variables start with.

An initialiser is a function (shape, dtype, stream) -> array of the host. The fans of a shape are
the numbers of inputs and outputs that one weight connects: of [in, out] these two, of a filter
[kh, kw, in, out] both times kh·kw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import Any

import numpy as np

from minidist.dtypes import HostArray, as_array
from minidist.random import Stream

Initializer = Callable[[Sequence[int], Any, Stream], HostArray]

# The standard deviation of a standard normal that is cut off at ±2.
_CUT = 0.87962566103423978


def zeros() -> Initializer:
    """All 0."""
    return lambda shape, dtype, stream: np.zeros(shape, dtype)


def ones() -> Initializer:
    """All 1."""
    return lambda shape, dtype, stream: np.ones(shape, dtype)


def constant(value: float) -> Initializer:
    """All `value`."""
    return lambda shape, dtype, stream: as_array(np.full(shape, value), dtype)


def truncated_normal(stddev: float = 0.05) -> Initializer:
    """Normal with what is beyond 2σ drawn again, so a little narrower than `stddev`."""
    return lambda shape, dtype, stream: stream.truncated_normal(shape, dtype, stddev=stddev)


def glorot_uniform() -> Initializer:
    """Uniform in ±√(6/(fan in + fan out)) (Glorot and Bengio, 2010)."""

    def initial(shape: Sequence[int], dtype: Any, stream: Stream) -> HostArray:
        limit = sqrt(6 / max(sum(_fans(shape)), 1))
        return stream.uniform(shape, dtype, -limit, limit)

    return initial


def he_normal() -> Initializer:
    """Normal of variance 2/fan in (He et al., 2015), cut off at 2σ and widened to have it still."""

    def initial(shape: Sequence[int], dtype: Any, stream: Stream) -> HostArray:
        fan_in, _ = _fans(shape)
        return stream.truncated_normal(shape, dtype, stddev=sqrt(2 / max(fan_in, 1)) / _CUT)

    return initial


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) < 2:
        return prod(shape), prod(shape)
    field = prod(shape[:-2])
    return shape[-2] * field, shape[-1] * field
