"""Images in a folder for each class, as one sorts them by hand.

    train/cat/1.jpg  train/cat/2.jpg  train/dog/a.jpg  …  val/cat/7.jpg  …

The part to test on is `val`, or `test` where there is no `val`. Classes are numbered in the order
of their names, and so are the images of a class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Dataset, shuffled
from minidist.data.files import folder, whole
from minidist.data.images import Images
from minidist.data.preprocess import Settings
from minidist.errors import DataError, ImageError

SUFFIXES = (".jpg", ".jpeg")  # of images; also in capitals
TRAIN, TEST = "train", ("val", "test")
LAYOUT = "expected train/CLASS/*.jpg, and val/CLASS/*.jpg or test/CLASS/*.jpg"


def load(data_dir: str, shape: tuple[int, ...], settings: Settings) -> Dataset:
    """Return the data set in a folder, its images as inputs of that shape, (height, width, 3).

    Raises DataError where the folder is not what the module's table shows.
    """
    train, test = parts(data_dir)
    return Dataset(
        "folder",
        Images(train, shape, settings, train=True),
        Images(test, shape, settings, train=False),
        len(train.classes),
        synthetic=False,
        names=train.classes,
    )


def parts(data_dir: str) -> tuple[Folder, Folder]:
    """Return the images to train on and those to test on."""
    path = folder(data_dir)
    classes = _names(path / TRAIN, folders=True)
    test = next((path / name for name in TEST if (path / name).is_dir()), None)
    if test is None:
        raise DataError(f"{path}: there is no folder {' or '.join(TEST)} in it: {LAYOUT}")
    unknown = sorted(set(_names(test, folders=True)) - set(classes))
    if unknown:
        raise DataError(
            f"{test / unknown[0]}: no folder in {path / TRAIN} has that name, so nothing is learnt "
            "of this class: add it there, or remove it here"
        )
    train = Folder(path / TRAIN, classes)
    empty = [name for label, name in enumerate(classes) if not train.of_class(label)]
    if empty:
        raise DataError(
            f"{path / TRAIN / empty[0]}: there is no image in it, so nothing is learnt of this "
            f"class: {LAYOUT}"
        )
    return train, Folder(test, classes)


class Folder:
    """The images of one part, as Stored ones, class after class; `classes` are their names.

    Raises DataError for folders that cannot be read, and where there is no image at all.
    """

    cut_off = 0

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self._folders = [path / name for name in classes]
        found = [_names(one, folders=False) if one.is_dir() else [] for one in self._folders]
        self._names = [name for names in found for name in names]
        self._begins = np.cumsum([0, *map(len, found)])
        if not self._names:
            raise DataError(f"{path}: there is no image in its folders: {LAYOUT}")

    def __len__(self) -> int:
        return len(self._names)

    def path(self, number: int) -> Path:
        """Return the file of an image."""
        return self._folders[self.label(number)] / self._names[number]

    def label(self, number: int) -> int:
        """Return the number of an image's class."""
        return int(np.searchsorted(self._begins, number, side="right")) - 1

    def load(self, number: int) -> tuple[bytes, int]:
        """Return a file's bytes and its label."""
        return whole(self.path(number)), self.label(number)

    def error(self, number: int, error: ImageError) -> DataError:
        """Return the DataError that says, too, which file it is."""
        return DataError(f"{self.path(number)}: byte {error.byte}: {error}")

    def fellows(self, number: int) -> range:
        """Return the numbers of the images of the same class."""
        return self.of_class(self.label(number))

    def of_class(self, label: int) -> range:
        """Return the numbers of the images of a class."""
        return range(int(self._begins[label]), int(self._begins[label + 1]))

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return all numbers, shuffled."""
        return shuffled(len(self), seed, epoch)


def _names(path: Path, folders: bool) -> list[str]:
    """Return the names of the folders, or else of the images, in a folder; sorted."""
    try:
        with os.scandir(path) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name[0] != "."
                and (entry.is_dir() if folders else entry.name.lower().endswith(SUFFIXES))
            ]
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such folder: {LAYOUT}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return sorted(names)
