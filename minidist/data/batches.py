"""Batches of examples in an order that a seed and the number of the epoch decide, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Examples
from minidist.errors import UsageError
from minidist.input.rounds import Part


class Batches:
    """Iterate over (images [b, h, w, c] float32, labels [b] int64), b at most batch_size.

    An epoch visits every example exactly once; its last batch is shorter when batch_size does not
    divide the number of examples (`drop_remainder` leaves it out instead). `epochs=None` never
    ends. Epoch e is shuffled by the Philox generator of key (seed, e), so that any batch can be
    reached without those before it: `start=n` begins with what would be batch n from 0. Every
    iteration begins anew and gives the same batches.

    With `shuffle=False` the batches are views of the examples in their own order; else copies.
    `parts` gives some rows of each batch, as a process of several needs them, and copies no others.

    Raises UsageError for a batch_size below one or above the number of examples, fewer epochs than
    one, a negative start, or a seed outside 64 bits.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        drop_remainder: bool = False,
        start: int = 0,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"a batch needs at least 1 example, but batch_size is {batch_size}")
        if batch_size > len(examples):
            raise UsageError(
                f"a batch of {batch_size} examples is larger than the data set, which has "
                f"{len(examples)}: make the batch smaller"
            )
        if epochs is not None and epochs < 1:
            raise UsageError(f"epochs must be at least 1, or None for no end, but it is {epochs}")
        if start < 0:
            raise UsageError(f"start must be the number of a batch, from 0, but it is {start}")
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed must be from 0 to 2**64 - 1, but it is {seed}")
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.start = start
        full, rest = divmod(len(examples), batch_size)
        self.batches_per_epoch = full + (rest > 0 and not drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts(slice):
            yield part.values

    def parts(self, rows: Callable[[int], slice]) -> Iterable[Part]:
        """Return an iterable of parts: `rows` says which rows of so many examples are in them."""
        return _Parts(self, rows)

    def of_epoch(self, epoch: int, first: int, rows: Callable[[int], slice]) -> Iterator[Part]:
        """Give parts of an epoch's batches, from number `first` on."""
        images, labels = self.examples.images, self.examples.labels
        order = self._order(epoch) if self.shuffle else None
        for batch in range(first, self.batches_per_epoch):
            begin = batch * self.batch_size
            size = min(self.batch_size, len(self.examples) - begin)
            start, stop, _ = rows(size).indices(size)
            wanted = slice(begin + start, begin + stop)
            if order is None:
                values = images[wanted], labels[wanted]
            else:
                values = images.take(order[wanted], axis=0), labels.take(order[wanted])
            yield Part(values, size)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        key = np.array([self.seed, epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(len(self.examples))


class _Parts:
    """Parts of batches, from their beginning in each iteration."""

    def __init__(self, batches: Batches, rows: Callable[[int], slice]) -> None:
        self._batches = batches
        self._rows = rows
        self.__qualname__ = type(batches).__qualname__

    def __iter__(self) -> Iterator[Part]:
        batches = self._batches
        epoch, first = divmod(batches.start, batches.batches_per_epoch)
        while batches.epochs is None or epoch < batches.epochs:
            yield from batches.of_epoch(epoch, first, self._rows)
            epoch, first = epoch + 1, 0
