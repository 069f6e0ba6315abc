"""Wire: what a push of gradients and its answer look like.

    push      group, flags, steps so far, factor │ the optimizer's numbers │ a table │ gradients
    answer    flags, steps now                   │ versions                │ a table │ values

A table says of each variable of the group, as the ps has them, what there is of it: nothing, the
whole array, or so many rows, as their numbers and their values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minidist.comm.flat import Kind
from minidist.device import Array

NOTHING, WHOLE = -2, -1  # in a table; else it is a number of rows
MUST_BE_FINITE, FINITE, NO_STEP, APPLIED = 1, 2, 4, 8  # flags

_PUSH = struct.Struct("<IIQd")
_ANSWER = struct.Struct("<IxxxxQ")
_INDEX = np.dtype(np.int64)

Rows = tuple[Array, Array]  # numbers of rows, and their values
Part = Array | Rows | None


class Push(NamedTuple):
    """The text of a push.

    group: its number among the groups of the worker. flags: MUST_BE_FINITE where gradients are
    applied only if they are all finite; FINITE where the worker's own are; NO_STEP where it has no
    example, or none that counts. step: how often the
    worker's optimizer has been applied before. scale: what the sums are to be multiplied by.
    numbers: the optimizer's, NaN for None. table: see above.
    """

    group: int
    flags: int
    step: int
    scale: float
    numbers: Sequence[float]
    table: Sequence[int]

    def text(self) -> bytes:
        return (
            _PUSH.pack(self.group, self.flags, self.step, self.scale)
            + np.array(self.numbers, np.float64).tobytes()
            + np.array(self.table, np.int64).tobytes()
        )

    @staticmethod
    def group_of(text: bytes) -> int:
        return int(_PUSH.unpack_from(text)[0])

    @classmethod
    def of(cls, text: bytes, numbers: int) -> Push:
        """Read a text; `numbers` says how many the optimizer has."""
        start = _PUSH.size + 8 * numbers
        values = np.frombuffer(text[_PUSH.size : start], np.float64)
        table = np.frombuffer(text[start:], np.int64)
        group, flags, step, scale = _PUSH.unpack_from(text)
        return cls(group, flags, step, scale, values.tolist(), table.tolist())


class Pushed(NamedTuple):
    """The text of the answer.

    steps: how often the optimizer has been applied on the ps. found, left: the version of each
    variable before and after.
    """

    flags: int
    steps: int
    found: Sequence[int]
    left: Sequence[int]
    table: Sequence[int]

    def text(self) -> bytes:
        numbers = np.array([*self.found, *self.left, *self.table], np.int64)
        return _ANSWER.pack(self.flags, self.steps) + numbers.tobytes()

    @classmethod
    def of(cls, text: bytes) -> Pushed:
        numbers = np.frombuffer(text[_ANSWER.size :], np.int64).tolist()
        n = len(numbers) // 3
        flags, steps = _ANSWER.unpack_from(text)
        return cls(flags, steps, numbers[:n], numbers[n : 2 * n], numbers[2 * n :])

    @staticmethod
    def nbytes(variables: int) -> int:
        """Return the length of the text."""
        return _ANSWER.size + 24 * variables


def push_nbytes(numbers: int, variables: int) -> int:
    """Return the length of a push's text."""
    return _PUSH.size + 8 * (numbers + variables)


def rows_kinds(kind: Kind, count: int) -> tuple[Kind, Kind]:
    """Return the kinds of so many rows: of their numbers and their values."""
    return Kind((count,), _INDEX), Kind((count, *kind.shape[1:]), kind.dtype)


def kinds(variables: Sequence[Kind], table: Sequence[int]) -> list[Kind]:
    """Return the kinds of the arrays that a table announces."""
    found: list[Kind] = []
    for kind, entry in zip(variables, table, strict=True):
        if entry == WHOLE:
            found.append(kind)
        elif entry != NOTHING:
            found += rows_kinds(kind, entry)
    return found


def parts(arrays: Sequence[Array], table: Sequence[int]) -> list[Part]:
    """Return for each variable what there is of it, out of all the arrays."""
    left = iter(arrays)
    found: list[Part] = []
    for entry in table:
        if entry == NOTHING:
            found.append(None)
        else:
            found.append(next(left) if entry == WHOLE else (next(left), next(left)))
    return found
