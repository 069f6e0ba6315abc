"""Flat: arrays of several shapes and dtypes one behind the other in one buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.device import Array

ALIGNMENT = 64  # bytes; each array begins at a multiple of it


class Kind(NamedTuple):
    """What is known of an array before there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: Any) -> Kind:
        """Return that of anything with a shape and a dtype, such as a variable."""
        return cls(tuple(array.shape), array.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def aligned(nbytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def room(kinds: Iterable[Kind]) -> int:
    """Return how many bytes arrays of these kinds take in a buffer."""
    return sum(aligned(kind.nbytes) for kind in kinds)


def places(buffer: Array, start: int, kinds: Sequence[Kind]) -> list[Array]:
    """Return the arrays of these kinds in a buffer of bytes, from an aligned byte on."""
    arrays = []
    for kind in kinds:
        arrays.append(buffer[start : start + kind.nbytes].view(kind.dtype).reshape(kind.shape))
        start += aligned(kind.nbytes)
    return arrays
