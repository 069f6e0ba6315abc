"""Slot: a tuple of tensors in one block of memory, which a copy stream fills.

A `Form` says which tuples are meant and where their tensors lie in a block.

The way of a block
  1. `Slot` leases one. Where its last readers may not be done, the copy stream will wait for them.
  2. The copy stream waits for what computed the sources, then copies; then `copied` has happened.
  3. A consumer's stream waits for that, and reads tensors that are views of the block.
  4. When these and all their views have been dropped, the block can be leased again: for use after
     what the consumer's stream has been given until then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from minidist import observe
from minidist.delegate import current
from minidist.device import Array, Device, Stream, host
from minidist.device.base import ALIGNMENT
from minidist.device.lease import Loan, Pool
from minidist.dtypes import as_array, as_dtype, kind
from minidist.errors import ShapeError, UsageError
from minidist.tensor import Reading, Tensor

BRIEF = 64 * 1024  # bytes that are copied sooner than another thread wakes up
_BYTE = np.dtype(np.uint8)

Shape = tuple[int, ...]
Pattern = tuple[int | None, ...] | None  # None: any length, or any shape
Place = tuple[int, int, np.dtype[Any], Shape]  # first byte and end of a tensor in a block


class Form:
    """How many tensors a tuple has, of which dtypes and shapes; see StagingArea."""

    def __init__(self, dtypes: Any, shapes: Sequence[Sequence[int | None] | None] | None) -> None:
        several = dtypes if isinstance(dtypes, tuple | list) else [dtypes]
        try:
            known = [None if dtype is None else as_dtype(dtype) for dtype in several]
        except TypeError:
            known = []
        if not known or not all(dtype is not None and kind(dtype) in "fiub" for dtype in known):
            raise UsageError(f"a StagingArea is for numbers and booleans, not for {dtypes!r}")
        self.dtypes = tuple(dtype.newbyteorder("=") for dtype in known if dtype is not None)
        given = [None] * len(self.dtypes) if shapes is None else shapes
        if not isinstance(given, tuple | list) or not all(map(_is_pattern, given)):
            raise UsageError(
                "shapes has for each tensor a shape, of whole numbers from 0 on or None, or None; "
                f"{shapes!r} has not"
            )
        if len(given) != len(self.dtypes):
            raise UsageError(
                f"a StagingArea of {len(self.dtypes)} dtypes was given {len(given)} shapes"
            )
        self._patterns: list[Pattern] = [None if each is None else tuple(each) for each in given]

    def sources(self, values: Any, whose: object) -> list[Tensor]:
        """Return values of this form as Tensors of any device: Readings where they may change."""
        values = values if isinstance(values, tuple | list) else (values,)
        if len(values) != len(self.dtypes):
            raise ShapeError(
                f"{len(values)} values were put into {whose!r}; an item of it has "
                f"{len(self.dtypes)}"
            )
        sources = []
        expected = zip(values, self.dtypes, self._patterns, strict=True)
        for i, (value, dtype, pattern) in enumerate(expected):
            if not isinstance(value, Tensor):
                value = _reading(current(value), dtype)
            if value.dtype != dtype and value.dtype.newbyteorder("=") != dtype:
                raise ShapeError(
                    f"value {i} put into {whose!r} has dtype {value.dtype}, not {dtype}; convert "
                    "it with ops.cast"
                )
            if pattern is not None and not _fits(value.shape, pattern):
                raise ShapeError(
                    f"value {i} put into {whose!r} has shape {value.shape}, not {pattern}"
                )
            sources.append(value)
        return sources


class Slot:
    """The values of `sources`, on `device`, as soon as `copied` has happened.

    `nbytes` is theirs. `failures` is why they will never be there; it is filled by then.
    """

    __slots__ = ("_places", "copied", "device", "failures", "loan", "nbytes")

    def __init__(
        self, device: Device, pool: Pool, form: Form, sources: Sequence[Tensor], what: str
    ) -> None:
        stream = device.stream("copy")
        for computing in {source.device for source in sources}:
            computed = computing.stream("compute").record()
            if not computed.done():
                stream.wait(computed)
        size, self._places = _layout(form.dtypes, tuple(source.shape for source in sources))
        lease = pool.lease((size,), _BYTE, on=stream)
        self.device = device
        self.nbytes: int = sum(source.array.nbytes for source in sources)
        self.failures: list[Exception] = []
        self.loan = Loan(lease)
        # The copy knows the buffer and not the loan: it holds no block that nobody else needs.
        arrays, given = _cut(lease.array, self._places), [source.array for source in sources]
        homes = [source.device for source in sources]
        copy = partial(_copy, device, arrays, given, homes, what, self.failures)
        stream.submit(copy, brief=self.nbytes <= BRIEF)
        self.copied = stream.record()
        self.loan.written.append(self.copied)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the values: views of the block, which is theirs as long as one of them lives."""
        block = self.loan.array(self.device)
        return tuple(Tensor(array, self.device) for array in _cut(block, self._places))

    def await_copy(self, readers: set[Stream], timeout: float) -> None:
        """Let the streams that will read wait for the copy.

        Those whose work the calling thread does block; that raises HangError after `timeout`.
        """
        try:
            for stream in readers:
                stream.wait(self.copied, timeout)
        except Exception as failure:
            if not self.copied.done():  # nothing is wrong but that it is late
                raise
            self.failures.append(failure)  # of what the copy stream was given before


def _copy(
    device: Device,
    arrays: Sequence[Array],
    sources: Sequence[Array],
    homes: Sequence[Device],
    what: str,
    failures: list[Exception],
) -> None:
    """Fill a slot. What goes wrong is this slot's matter and not the stream's."""
    try:
        nbytes = sum(array.nbytes for array in arrays) if observe.watching else 0
        with observe.span("copy", "a staged item", device=device.short, bytes=nbytes):
            for array, source, home in zip(arrays, sources, homes, strict=True):
                device.copy(array, source)
                if observe.counting:
                    observe.moved(home.short, device.short, array.nbytes, what)
    except Exception as failure:
        failures.append(failure)


def _cut(block: Array, places: Sequence[Place]) -> list[Array]:
    return [block[start:end].view(dtype).reshape(shape) for start, end, dtype, shape in places]


@lru_cache(maxsize=256)
def _layout(
    dtypes: tuple[np.dtype[Any], ...], shapes: tuple[Shape, ...]
) -> tuple[int, list[Place]]:
    """Return the bytes of a block for such tensors, and the place of each.

    Each is 64-byte aligned. Blocks come in four sizes for each power of two, so that tensors whose
    lengths vary find blocks that were used by others.
    """
    places: list[Place] = []
    end = 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        places.append((start, end, dtype, shape))
    grain = max(ALIGNMENT, 1 << max(0, end.bit_length() - 3))
    return -(-end // grain) * grain, places


def _reading(value: Any, dtype: np.dtype[Any]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "read"):
        read: Tensor = value.read()
        return Reading(read.array, read.device)
    array = np.asarray(value)
    if not hasattr(value, "dtype"):  # numbers of Python's become what the area is for, if they fit
        same_kind = array.dtype.kind == kind(dtype) or np.can_cast(array.dtype, dtype, "same_kind")
        if same_kind or {array.dtype.kind, kind(dtype)} <= {"i", "u"}:
            fitting = as_array(array, dtype)
            if kind(dtype) == "f" or np.array_equal(fitting, array):
                array = fitting
    return Reading(array, host())


def _is_pattern(shape: Any) -> bool:
    return shape is None or (
        isinstance(shape, tuple | list)
        and all(
            length is None or (isinstance(length, int | np.integer) and length >= 0)
            for length in shape
        )
    )


def _fits(shape: Shape, pattern: tuple[int | None, ...]) -> bool:
    return len(shape) == len(pattern) and all(
        length is None or length == given for given, length in zip(shape, pattern, strict=True)
    )
