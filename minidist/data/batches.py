"""Batches of examples in an order that a seed and the number of the epoch decide, nothing else.

With workers (`workers.py`) the rows of a batch are divided among threads, and some batches are on
their way at a time. What is in a batch, and in which order batches come, is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidist.data.dataset import Examples, Split
from minidist.data.workers import Piece, Reading, Workers
from minidist.device import host
from minidist.errors import UsageError
from minidist.input.rounds import Part
from minidist.patience import DEADLINE


class Batches:
    """Iterate over (inputs [b, *shape], labels [b, *label_shape] int64), b at most batch_size.

    An epoch visits every example exactly once; its last batch is shorter when batch_size does not
    divide the number of examples (`drop_remainder` leaves it out instead). `epochs=None` never
    ends. The order of an epoch follows from (seed, epoch), so that any batch can be reached without
    those before it: `start=n` begins with what would be batch n from 0. Every iteration begins anew
    and gives the same batches.

    With `shuffle=False` examples come in their own order, and Examples as views of them; all else
    is written into arrays that are made for each batch.
    `parts` gives some rows of each batch, as a process of several needs them, and reads no others.

    workers: how many threads read; with 0 whoever iterates does. They may be up to `ahead` batches
    further than what was taken. deadline: the seconds after which a batch that is waited for is a
    HangError.

    Raises UsageError for a batch_size below one or above the number of examples, fewer epochs than
    one, a negative start, a seed outside 64 bits, or fewer workers than none.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        drop_remainder: bool = False,
        start: int = 0,
        workers: int = 0,
        ahead: int = 2,
        deadline: float = DEADLINE,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"a batch needs at least 1 example, but batch_size is {batch_size}")
        if batch_size > len(split):
            raise UsageError(
                f"a batch of {batch_size} examples is larger than the data set, which has "
                f"{len(split)}: make the batch smaller"
            )
        if epochs is not None and epochs < 1:
            raise UsageError(f"epochs must be at least 1, or None for no end, but it is {epochs}")
        if start < 0:
            raise UsageError(f"start must be the number of a batch, from 0, but it is {start}")
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed must be from 0 to 2**64 - 1, but it is {seed}")
        if workers < 0 or ahead < 1:
            raise UsageError(
                f"workers must be at least 0 and ahead at least 1, but they are {workers} and "
                f"{ahead}"
            )
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.start = start
        self.workers = workers
        self.ahead = ahead
        self.deadline = deadline
        full, rest = divmod(len(split), batch_size)
        self.batches_per_epoch = full + (rest > 0 and not drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts(slice):
            yield part.values

    def parts(self, rows: Callable[[int], slice]) -> Iterable[Part]:
        """Return an iterable of parts: `rows` says which rows of so many examples are in them."""
        return _Parts(self, rows)

    def of_epoch(self, epoch: int, first: int, rows: Callable[[int], slice]) -> Iterator[_Begun]:
        """Give parts of an epoch's batches that are still to be read, from number `first` on."""
        split = self.split
        order = split.order(self.seed, epoch) if self.shuffle else np.arange(len(split))
        for batch in range(first, self.batches_per_epoch):
            begin = batch * self.batch_size
            size = min(self.batch_size, len(split) - begin)
            start, stop, _ = rows(size).indices(size)
            wanted = slice(begin + start, begin + stop)
            if isinstance(split, Examples) and not self.shuffle:
                yield _Begun(Part((split.images[wanted], split.labels[wanted]), size), ())
                continue
            numbers = order[wanted]
            inputs = host().allocate((len(numbers), *split.shape), split.dtype)
            labels = host().allocate((len(numbers), *split.label_shape), np.int64)
            pieces = [
                partial(split.read, numbers[of], self.seed, epoch, inputs[of], labels[of])
                for of in _cut(len(numbers), split.grain if self.workers else len(numbers))
            ]
            yield _Begun(Part((inputs, labels), size), pieces)


class _Begun(NamedTuple):
    """A part of a batch, whose arrays are complete when all pieces have been read."""

    part: Part
    pieces: Sequence[Piece]


def _cut(rows: int, grain: int) -> list[slice]:
    """Divide rows into as few slices as there can be of `grain` at most, all about as long."""
    count = -(-rows // grain) if rows else 0
    ends = [rows * i // count for i in range(count + 1)] if count else []
    return list(map(slice, ends, ends[1:]))


class _Parts:
    """Parts of batches, from their beginning in each iteration."""

    def __init__(self, batches: Batches, rows: Callable[[int], slice]) -> None:
        self._batches = batches
        self._rows = rows
        self.__qualname__ = type(batches).__qualname__

    def __iter__(self) -> Iterator[Part]:
        return self._by_workers() if self._batches.workers else self._here()

    def _here(self) -> Iterator[Part]:
        for part, pieces in self._all():
            for read in pieces:
                read()
            yield part

    def _by_workers(self) -> Iterator[Part]:
        batches = self._batches
        begun: deque[tuple[Part, Reading]] = deque()
        with Workers(batches.workers, self.__qualname__, batches.deadline) as workers:
            for part, pieces in self._all():
                begun.append((part, workers.give(pieces)))
                if len(begun) > batches.ahead:
                    yield _first(begun, workers)
            while begun:
                yield _first(begun, workers)

    def _all(self) -> Iterator[_Begun]:
        batches = self._batches
        epoch, first = divmod(batches.start, batches.batches_per_epoch)
        while batches.epochs is None or epoch < batches.epochs:
            yield from batches.of_epoch(epoch, first, self._rows)
            epoch, first = epoch + 1, 0


def _first(begun: deque[tuple[Part, Reading]], workers: Workers) -> Part:
    """Return the batch that was begun first, once it has been read."""
    part, reading = begun.popleft()
    workers.wait(reading)
    return part
