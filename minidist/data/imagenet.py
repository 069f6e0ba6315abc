"""ImageNet in TFRecord files, as the ancestor reads it, and other images in such files.

    train-00000-of-01024 …  validation-00000-of-00128 …  labels.txt

Labels in the files count from 1; 0 is the background, which no image is of. `labels.txt`, where it
is there, has the name of a class on each line, the first that of label 1. Without it there are
ImageNet's 1,000 classes, and with the background 1,001. Some of the files, such as one of 1,024,
are a smaller data set.
"""

from __future__ import annotations

import re
from pathlib import Path

from minidist.data.dataset import Dataset
from minidist.data.files import folder, whole
from minidist.data.images import Images
from minidist.data.preprocess import Settings
from minidist.data.records import Records
from minidist.errors import DataError

TRAIN, TEST = "train", "validation"
LABELS = "labels.txt"
CLASSES = 1001
BACKGROUND = "background"


def load(data_dir: str, shape: tuple[int, ...], settings: Settings) -> Dataset:
    """Return the data set in a folder, its images as inputs of that shape, (height, width, 3).

    Raises DataError where files are missing or damaged.
    """
    path = folder(data_dir)
    names = _names(path / LABELS)
    classes = len(names) or CLASSES
    train, test = (
        Records(shards(path, part), classes, settings.skip_bad_records) for part in (TRAIN, TEST)
    )
    return Dataset(
        "imagenet",
        Images(train, shape, settings, train=True),
        Images(test, shape, settings, train=False),
        classes,
        synthetic=False,
        names=names,
    )


def shard_name(part: str, number: int, count: int) -> str:
    """Return the name of one of `count` files, by number from 0."""
    return f"{part}-{number:05}-of-{count:05}"


def shards(path: Path, part: str) -> list[Path]:
    """Return the files of a part, in order. DataError for none or a mixture."""
    found = {
        name: match[1]
        for name in sorted(file.name for file in path.iterdir())
        if (match := re.fullmatch(rf"{part}-\d{{5,}}-of-(\d{{5,}})", name))
    }
    compressed = sorted(path.glob(f"{part}-*-of-*.gz"))
    if compressed:
        raise DataError(f"{compressed[0]}: the file is compressed: unpack it with gunzip")
    if not found:
        raise DataError(
            f"{path}: there is no file of TFRecords to be read as {part!r}: expected files named "
            f"as {shard_name(part, 0, 1024)}"
        )
    totals = sorted(set(found.values()))
    if len(totals) > 1:
        raise DataError(
            f"{path}: files of several sets lie together, of {' and of '.join(totals)} files of "
            f"{part!r}: keep one of them"
        )
    return [path / name for name in found]


def _names(path: Path) -> tuple[str, ...]:
    """Return the classes' names, from that of the background on; none where there is no file."""
    if not path.exists():
        return ()
    try:
        lines = whole(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: expected UTF-8") from error
    if lines[-1] == "":
        del lines[-1]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise DataError(f"{path}: line {number}: expected the name of a class")
    if not lines:
        raise DataError(f"{path}: expected the name of a class on each line, but there is none")
    return BACKGROUND, *(line.strip() for line in lines)
