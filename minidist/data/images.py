"""Encoded images as a part of a data set: each is read and made ready when it is asked for."""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minidist.data.preprocess import Settings, make
from minidist.errors import DataError, ImageError


class Stored(Protocol):
    """Encoded images as they are stored, by number from 0. Any number of threads may ask."""

    def __len__(self) -> int: ...

    @property
    def cut_off(self) -> int:
        """How many files are damaged so that only their first images can be found."""
        ...

    def load(self, number: int) -> tuple[bytes, int]:
        """Return an image and its label.

        Raises ImageError where what is stored is damaged, DataError where it cannot be read.
        """
        ...

    def error(self, number: int, error: ImageError) -> DataError:
        """Return the DataError that says, too, where the damaged image is stored."""
        ...

    def fellows(self, number: int) -> range:
        """Return the numbers of the images that can stand in for this one."""
        ...

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return all numbers in the order of an epoch that is shuffled."""
        ...


class Images:
    """A Split of stored images, which become float32 inputs of `shape`, (height, width, 3).

    train: they are cropped, flipped and distorted at random; else the middle is taken.

    A damaged image is a DataError that says which it is. With `skip_bad_records` it is replaced by
    the next good one of its fellows, as if that were in its place too, so that all others stay as
    they were; `skipped` has those that are damaged.
    """

    dtype: np.dtype[Any] = np.dtype(np.float32)
    label_shape: tuple[int, ...] = ()
    grain = 1

    def __init__(
        self, stored: Stored, shape: tuple[int, ...], settings: Settings, train: bool
    ) -> None:
        self.stored = stored
        self.shape = shape
        self._prepare = make(settings, shape, train)
        self._skip = settings.skip_bad_records
        self._damaged: set[int] = set()

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def skipped(self) -> list[int]:
        """The damaged images that were met so far, and a number below 0 for each file cut off."""
        return [*range(-self.stored.cut_off, 0), *sorted(self._damaged.copy())]

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.stored.order(seed, epoch)

    def read(
        self,
        numbers: NDArray[np.int64],
        seed: int,
        epoch: int,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
    ) -> None:
        for row, number in enumerate(numbers.tolist()):
            labels[row] = self._example(number, seed, epoch, inputs[row])

    def _example(self, number: int, seed: int, epoch: int, out: NDArray[Any]) -> int:
        """Write one input, and return its label."""
        fellows = self.stored.fellows(number)
        for candidate in chain(range(number, fellows.stop), range(fellows.start, number)):
            if candidate in self._damaged:
                continue
            try:
                content, label = self.stored.load(candidate)
                self._prepare(content, seed, epoch, number, out)
                return label
            except ImageError as error:
                if not self._skip:
                    raise self.stored.error(candidate, error) from error
                self._damaged.add(candidate)
        raise self.stored.error(
            number,
            ImageError(0, "this is damaged, and so is everything that could stand in for it"),
        )
