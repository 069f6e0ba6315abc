"""TFRecord files made of a folder of images, as imagenet.py reads them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from minidist import tfrecord
from minidist.data import example, imagenet
from minidist.data.dataset import shuffled
from minidist.data.folder import Folder, parts
from minidist.data.preprocess.boxes import Box
from minidist.data.preprocess.decode import Encoded
from minidist.errors import DataError, ImageError, MinidistError
from minidist.tensor_file import sync
from minidist.threads import allowed

SHARD_IMAGES = 1250  # about as many as a file of ImageNet's has
AT_ONCE = 64  # images that are in memory
PARTIAL = ".partial"  # ends the name of the folder while it is written


def write(
    source: Path,
    target: Path,
    say: Callable[[str], None],
    shard_images: int,
    skip_bad_records: bool,
) -> None:
    """Write the images of a folder to a new one, and say so of each file.

    They are shuffled, always in the same way, so that each file has some of all classes and the
    same images become the same bytes; a file has at most `shard_images`. Each image is decoded
    once: one that is damaged is an error, or left out and counted with `skip_bad_records`.

    The target is there when all is written, or not at all. Raises DataError where something cannot
    be read or written, or the target is there already.
    """
    train, test = parts(os.fspath(source))
    with _new(target) as folder, ThreadPoolExecutor(len(allowed())) as threads:
        with _saved(folder / imagenet.LABELS) as file:
            file.write(_lines(source, train.classes))
        for part, images in ((imagenet.TRAIN, train), (imagenet.TEST, test)):
            record = partial(_record, images, skip_bad_records)
            order = shuffled(len(images), seed=0, epoch=0)
            count = -(-len(images) // shard_images)
            left_out = 0
            for shard, numbers in enumerate(np.array_split(order, count)):
                name, written = imagenet.shard_name(part, shard, count), 0
                with _saved(folder / name) as file:
                    for begin in range(0, len(numbers), AT_ONCE):
                        for data in threads.map(record, numbers[begin : begin + AT_ONCE].tolist()):
                            file.write(data)
                            written += data != b""
                left_out += len(numbers) - written
                say(f"{name}: {written} images")
            if left_out:
                say(f"{part}: {left_out} damaged images were left out")


def _record(images: Folder, skip: bool, number: int) -> bytes:
    """Return the record of an image; no byte where it is damaged and to be left out."""
    content, label = images.load(number)
    try:
        encoded = Encoded(content)
        encoded.pixels(Box(0, 0, encoded.height, encoded.width))
    except ImageError as error:
        if not skip:
            raise images.error(number, error) from error
        return b""
    features: dict[str, example.Given] = {
        "image/encoded": [content],
        "image/format": [b"JPEG"],
        "image/filename": [os.fsencode(images.path(number).name)],
        "image/height": np.array([encoded.height]),
        "image/width": np.array([encoded.width]),
        "image/class/label": np.array([label + 1]),  # 0 is the background
        "image/class/text": [images.classes[label].encode()],
    }
    return tfrecord.frame(example.build(features))


def _lines(source: Path, classes: tuple[str, ...]) -> bytes:
    """Return the classes' names as the lines of a file."""
    for name in classes:
        if name.strip() != name or not name.isprintable():
            raise DataError(
                f"{source}: the class {name!r} has a name that no line of {imagenet.LABELS} can "
                "hold: give its folders another one"
            )
    return "".join(f"{name}\n" for name in classes).encode()


@contextmanager
def _new(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes the target in the end, or else is removed."""
    if os.path.lexists(target):
        raise DataError(f"{target}: is there already: name a folder that is to be made")
    unfinished = target.with_name(target.name + PARTIAL)
    try:
        unfinished.mkdir()
    except FileExistsError:
        raise DataError(
            f"{unfinished}: somebody is writing it now, or was killed while he did: if nobody is, "
            "remove it"
        ) from None
    except OSError as error:
        raise DataError(f"{unfinished}: cannot be made: {error.strerror or error}") from error
    try:
        yield unfinished
        sync(unfinished)
        os.rename(unfinished, target)
        sync(target.parent)
    except MinidistError:
        raise
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _saved(path: Path) -> Iterator[IO[bytes]]:
    """Give a new file to write to, and bring it to the disk."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
