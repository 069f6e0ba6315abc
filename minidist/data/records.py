"""Encoded images in TFRecord files: each record an Example proto with the image and its label."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minidist.data import example
from minidist.data.dataset import generator
from minidist.data.shard import Shard
from minidist.errors import DataError, ImageError, MalformedError
from minidist.tensor_file import open_to_read

ENCODED, LABEL = "image/encoded", "image/class/label"
WANTED = frozenset((ENCODED, LABEL))
AT_ONCE = 16  # files whose headers are read at a time, so that a slow disk has enough to do
OPEN = 64  # files that are kept open; a process may open a thousand or so
CYCLE = 10  # files that an epoch goes through side by side, as the ancestor's
WINDOW = 10_000  # examples that it then shuffles among themselves, as the ancestor's


class Records:
    """The Examples of some TFRecord files, as Stored images; numbered file after file.

    Labels are those in the files, and must be from 0 to classes - 1.

    A file with a damaged header is an error, or else, with `skip_bad_records` and a record before
    it, the file is read up to there and counts as one of the `cut_off`. Raises DataError for files
    that cannot be read, or that have no record at all.
    """

    def __init__(self, paths: Sequence[Path], classes: int, skip_bad_records: bool) -> None:
        with ThreadPoolExecutor(AT_ONCE, "minidist headers") as threads:
            self.shards = list(threads.map(Shard, paths))
        damaged = [shard for shard in self.shards if shard.damage is not None]
        lost = [shard for shard in damaged if not (skip_bad_records and len(shard))]
        if lost:
            raise lost[0].error(len(lost[0]), lost[0].damage)
        self.cut_off = len(damaged)
        self.classes = classes
        self._begins = np.cumsum([0, *map(len, self.shards)])
        if len(self) == 0:
            raise DataError(
                f"{paths[0]}: there is no record in it, nor in any other of these files"
            )
        self._opened = lru_cache(OPEN)(_Opened)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def load(self, number: int) -> tuple[bytes, int]:
        """Return the encoded image and its label. Raises ImageError where the record is damaged."""
        shard, place = self._place(number)
        opened = self._opened(shard.path)  # and kept until it has been read
        try:
            return self._image(shard.read(place, opened.file))
        except MalformedError as error:
            raise ImageError(0, str(error)) from error

    def _image(self, data: memoryview) -> tuple[bytes, int]:
        found = example.parse(data, WANTED)
        encoded, labels = found.get(ENCODED, []), found.get(LABEL, [])
        if not isinstance(encoded, list) or len(encoded) != 1:
            raise MalformedError(f"expected an Example with one text of bytes as {ENCODED!r}")
        if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or len(labels) != 1:
            raise MalformedError(f"expected an Example with one whole number as {LABEL!r}")
        label = int(labels[0])
        if not 0 <= label < self.classes:
            raise MalformedError(f"expected a label of 0 to {self.classes - 1}, but found {label}")
        return bytes(encoded[0]), label

    def error(self, number: int, error: ImageError) -> DataError:
        """Return the DataError that says, too, which record it is, and of which file."""
        shard, place = self._place(number)
        return shard.error(place, error)

    def fellows(self, number: int) -> range:
        """Return the numbers of the records in the same file."""
        shard = self._shard(number)
        return range(int(self._begins[shard]), int(self._begins[shard + 1]))

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return all numbers, shuffled nearly as well as one can, with a disk in mind.

        The files are dealt out, in random order, to a few lanes, which are gone through side by
        side; what comes out is shuffled in windows. So an epoch reads few files at a time, each
        from its beginning to its end.
        """
        draw = generator(seed, epoch)
        dealt = draw.permutation(len(self.shards))
        numbers, turns = [], []
        for lane in range(min(CYCLE, len(dealt))):
            files = [np.arange(*self._begins[file : file + 2]) for file in dealt[lane::CYCLE]]
            numbers.append(np.concatenate(files))
            turns.append(np.arange(len(numbers[-1])))
        order = np.concatenate(numbers)[np.argsort(np.concatenate(turns), kind="stable")]
        for begin in range(0, len(order), WINDOW):
            draw.shuffle(order[begin : begin + WINDOW])
        return order

    def _shard(self, number: int) -> int:
        return int(np.searchsorted(self._begins, number, side="right")) - 1

    def _place(self, number: int) -> tuple[Shard, int]:
        shard = self._shard(number)
        return self.shards[shard], number - int(self._begins[shard])


class _Opened:
    """A file that is closed when nobody reads it any more."""

    def __init__(self, path: Path) -> None:
        self.file = open_to_read(path)

    def __del__(self) -> None:
        if hasattr(self, "file"):  # not where there was no such file
            self.file.close()
