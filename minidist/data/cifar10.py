"""CIFAR-10 from its binary version: five files to train on, one to test on.

A file is 10,000 records of 3,073 bytes: the label, then 1,024 red, 1,024 green and 1,024 blue
pixels, each colour row by row (https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version").
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Dataset
from minidist.data.files import Reader, folder
from minidist.data.pixels import Pixels
from minidist.data.preprocess import Settings
from minidist.errors import DataError

CLASSES = 10
RECORDS = 10_000
RECORD_BYTES = 3073
TRAIN_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST_FILES = ["test_batch.bin"]
SUBFOLDER = "cifar-10-batches-bin"
PICKLED = "cifar-10-batches-py"
PAD = 4  # black pixels on each side, by which an image can be moved

CONVERT = (
    "python -c \"import pickle; [open(name + '.bin', 'wb').write(b''.join(bytes([label]) + "
    "row.tobytes() for label, row in zip(batch[b'labels'], batch[b'data']))) for name in "
    "[*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch'] for batch in "
    "[pickle.load(open(name, 'rb'), encoding='bytes')]]\""
)


def load(data_dir: str, settings: Settings) -> Dataset:
    """Read CIFAR-10 from a folder with its .bin files, or with cifar-10-batches-bin in it.

    Images are 32×32×3 (RGB); pixels become pixel / 127.5 - 1. Labels are 0 to 9. To train on, with
    distortions, an image is moved by up to 4 pixels, and half of them are mirrored.

    Raises DataError for files that are missing, truncated or too long, for labels above 9, and for
    the Python version of the data set, which is pickled and could run anything when it is read.
    """
    path = folder(data_dir)
    for name in (SUBFOLDER, PICKLED):  # in the latter they are where they have been converted
        if (path / name / TRAIN_FILES[0]).exists():
            path = path / name
            break
    for pickled in (path / "data_batch_1", path / PICKLED):
        if pickled.exists() and not (path / TRAIN_FILES[0]).exists():
            raise DataError(
                f"{pickled}: this is the Python (pickled) version of CIFAR-10, which minidist does "
                "not read, as unpickling can run any code: get the binary version, "
                "cifar-10-binary.tar.gz, from https://www.cs.toronto.edu/~kriz/cifar.html and "
                f"unpack it in {data_dir}; or, if you trust the files, convert them where they are "
                f"by\n{CONVERT}"
            )
    for name in TRAIN_FILES + TEST_FILES:
        if not (path / name).exists():
            raise DataError(
                f"{path}: {name} of CIFAR-10's binary version is missing: expected "
                f"{', '.join(TRAIN_FILES + TEST_FILES)} here or in {SUBFOLDER}"
            )
    train = _part([path / name for name in TRAIN_FILES], PAD if settings.distortions else None)
    test = _part([path / name for name in TEST_FILES], None)
    return Dataset("cifar10", train, test, CLASSES, synthetic=False)


def _part(paths: list[Path], pad: int | None) -> Pixels:
    images = np.empty((len(paths) * RECORDS, 32, 32, 3), np.uint8)
    labels = np.empty(len(images), np.int64)
    for number, path in enumerate(paths):
        rows = slice(number * RECORDS, (number + 1) * RECORDS)
        _read_file(path, images[rows], labels[rows])
    return Pixels(images, labels, pad)


def _read_file(path: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Read one file into images [RECORDS, 32, 32, 3] and labels [RECORDS]."""
    with Reader(path) as reader:
        content = reader.read(RECORDS * RECORD_BYTES, f"its {RECORDS} records")
        reader.finish()
        records = content.reshape(RECORDS, RECORD_BYTES)
        wrong = np.flatnonzero(records[:, 0] >= CLASSES)
        if wrong.size:
            raise reader.error(
                int(wrong[0]) * RECORD_BYTES,
                f"expected a label of 0 to {CLASSES - 1}, but found {records[wrong[0], 0]}",
            )
    labels[:] = records[:, 0]
    images[:] = records[:, 1:].reshape(RECORDS, 3, 32, 32).transpose(0, 2, 3, 1)
