"""The handwritten digits that come with minidist; digits.md names their source and licence."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from minidist.data.dataset import Dataset, Examples, scale_pixels
from minidist.errors import DataError

FILE = Path(__file__).with_name("digits.csv.gz")
COUNT = 1797


def load() -> Dataset:
    """Return the digits: 1,437 to train on and 360 to test on, 8×8×1, ten classes.

    Pixels 0..16 become pixel / 8 - 1. The split has no chance in it and keeps the classes in
    proportion: sort the examples by class (within a class they stay in the file's order) and take
    every fifth, from the first on, for the test part. Both parts then hold all 13 writers.

    Raises DataError when the file is missing or damaged.
    """
    try:
        with gzip.open(FILE, "rt", encoding="ascii") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"{FILE}: the digits cannot be read ({error}): install minidist again"
        ) from error
    if table.shape != (COUNT, 65):
        raise DataError(
            f"{FILE}: expected {COUNT} lines of 65 numbers but found {list(table.shape)}: "
            "install minidist again"
        )
    images = np.empty((COUNT, 8, 8, 1), np.float32)
    scale_pixels(table[:, :64].reshape(images.shape), out=images, brightest=16)
    labels = table[:, 64].astype(np.int64)
    tested = np.zeros(COUNT, dtype=bool)
    tested[np.argsort(labels, kind="stable")[::5]] = True
    return Dataset(
        "digits",
        train=Examples(images[~tested], labels[~tested]),
        test=Examples(images[tested], labels[tested]),
        classes=10,
        synthetic=False,
    )
