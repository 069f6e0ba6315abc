"""MNIST and its kin, from the four IDX files, plain or gzip.

An IDX file begins with two zero bytes, a byte for the type of the elements (8: unsigned byte), a
byte for the number of dimensions, and each dimension as a big-endian 32-bit number; the elements
follow, last dimension fastest (http://yann.lecun.com/exdb/mnist, "The IDX file format").
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Dataset
from minidist.data.files import Reader, folder
from minidist.data.pixels import Pixels
from minidist.errors import DataError

CLASSES = 10
UNSIGNED_BYTE = 8


def load(data_dir: str) -> Dataset:
    """Read MNIST from a folder that holds its four files under their usual names.

    These are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
    t10k-labels-idx1-ubyte; a dot may stand before `idx`, and `.gz` at the end. Images may have any
    height and width; pixels become pixel / 127.5 - 1, with one channel. Labels are 0 to 9.

    Raises DataError for files that are missing, truncated, too long or not IDX of unsigned bytes,
    for labels above 9, and when the numbers of images and labels, or the image sizes of the two
    parts, differ.
    """
    path = folder(data_dir)
    train = _part(path, "train")
    test = _part(path, "t10k")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{path}: training images are {train.images.shape[1:3]} but test images are "
            f"{test.images.shape[1:3]} (height, width): the files must belong together"
        )
    return Dataset("mnist", train, test, CLASSES, synthetic=False)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes with that many dimensions, none empty."""
    with Reader(path) as reader:
        magic = bytes(reader.read(4, "the magic number"))
        expected = bytes([0, 0, UNSIGNED_BYTE, dimensions])
        for byte, what in (
            (0, "two zero bytes, as IDX files begin"),
            (1, "two zero bytes, as IDX files begin"),
            (2, f"element type {UNSIGNED_BYTE} (unsigned byte)"),
            (3, f"{dimensions} dimension(s)"),
        ):
            if magic[byte] != expected[byte]:
                raise reader.error(byte, f"expected {what}, but found {magic[byte]}")
        header = reader.read(4 * dimensions, "the sizes of the dimensions")
        shape = tuple(int(size) for size in header.view(">u4"))
        for axis, size in enumerate(shape):
            if size == 0:
                raise reader.error(4 + 4 * axis, f"dimension {axis} is empty: expected at least 1")
        elements = reader.read(math.prod(shape), f"its {' × '.join(map(str, shape))} elements")
        reader.finish()
    return elements.reshape(shape)


def _part(path: Path, part: str) -> Pixels:
    images_file = _find(path, f"{part}-images", "idx3-ubyte")
    labels_file = _find(path, f"{part}-labels", "idx1-ubyte")
    labels = read_idx(labels_file, 1)
    wrong = np.flatnonzero(labels >= CLASSES)
    if wrong.size:
        raise DataError(
            f"{labels_file}: byte {8 + wrong[0]}: expected a label of 0 to {CLASSES - 1}, "
            f"but found {labels[wrong[0]]}"
        )
    pixels = read_idx(images_file, 3)
    if len(pixels) != len(labels):
        raise DataError(
            f"{images_file}: byte 4: expected {len(labels)} images, one for each label in "
            f"{labels_file.name}, but it has {len(pixels)}"
        )
    return Pixels(pixels[..., np.newaxis], labels.astype(np.int64))


def _find(path: Path, stem: str, suffix: str) -> Path:
    names = [f"{stem}{dot}{suffix}{gz}" for dot in "-." for gz in ("", ".gz")]
    for name in names:
        if (path / name).exists():
            return path / name
    raise DataError(f"{path}: a file of MNIST is missing: expected one of {', '.join(names)}")
