"""Data sets by name: images (digits, mnist, cifar10, imagenet, synthetic), text, and their batches.

| name      | without data_dir                       | with data_dir                            |
|-----------|----------------------------------------|------------------------------------------|
| digits    | the 1,797 real digits of this package  | refused: it reads no folder              |
| mnist     | synthetic, 28×28×1, 10 classes         | MNIST's four IDX files, plain or gzip    |
| cifar10   | synthetic, 32×32×3, 10 classes         | CIFAR-10's binary version, six .bin files|
| imagenet  | synthetic, 224×224×3, 1001 classes     | TFRecord files of encoded images         |
| folder    | refused: there is nothing to read      | JPEG files in a folder for each class    |
| synthetic | synthetic, 224×224×3, 1001 classes     | refused: it reads no folder              |
| text      | Python's own reference, as bytes       | all .txt files, one after the other      |

`image_shape` and `classes` replace the synthetic numbers of this table. Of real data the files say
the classes, and the shape too, except where images are encoded: these become any size. Pixels are
float32, about -1 to 1, in NHWC order; labels are int64 from 0 to classes - 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from minidist.data import cifar10, digits, folder, imagenet, mnist, synthetic, text
from minidist.data.batches import Batches
from minidist.data.dataset import Dataset, Examples, Split
from minidist.data.preprocess import Settings
from minidist.errors import UsageError

__all__ = ["SOURCES", "Batches", "Dataset", "Examples", "Settings", "Split", "load"]


class Source(NamedTuple):
    """Where a data set comes from without and with a data_dir, and what it looks like."""

    shape: tuple[int, ...]
    classes: int  # 0: nobody knows before it is read
    built_in: Callable[[], Dataset] | None = None  # None: synthetic images of this shape
    read: Callable[[str, tuple[int, ...], Settings], Dataset] | None = None
    any_shape: bool = False  # what is read becomes any shape that is asked for
    refusal: str = ""  # why there is nothing to read


SOURCES = {
    "digits": Source((8, 8, 1), 10, built_in=digits.load, refusal="it comes with minidist"),
    "mnist": Source((28, 28, 1), 10, read=lambda path, *_: mnist.load(path)),
    "cifar10": Source((32, 32, 3), 10, read=lambda path, _, settings: cifar10.load(path, settings)),
    "imagenet": Source((224, 224, 3), 1001, read=imagenet.load, any_shape=True),
    "folder": Source((224, 224, 3), 0, read=folder.load, any_shape=True),
    "synthetic": Source((224, 224, 3), 1001, refusal="its images are made up"),
    "text": Source(
        (text.TOKENS,),
        text.CLASSES,
        built_in=text.python_reference,
        read=lambda path, *_: text.load(path),
    ),
}


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    examples: int = synthetic.EXAMPLES,
    seed: int = 0,
    settings: Settings = Settings(),  # noqa: B008, it is frozen
) -> Dataset:
    """Load the data set of that name; the module's table says what each is.

    `examples` is how many a synthetic training part has (a benchmark needs no more than one global
    batch, used again and again, as the ancestor does); `seed` chooses the synthetic numbers. Real
    data depend on neither. `settings` say how images become inputs.

    Raises UsageError for an unknown name or an argument that the set does not take, DataError for
    files that are missing or not what they should be.
    """
    source = SOURCES.get(name)
    if source is None:
        raise UsageError(f"data set {name!r} is unknown: choose one of {', '.join(SOURCES)}")
    real = source.built_in is not None or data_dir is not None
    if real and (classes is not None or (image_shape is not None and not source.any_shape)):
        raise UsageError(
            f"image_shape and classes shape synthetic images only, but {name!r} here is real data: "
            "leave them out"
        )
    shape = source.shape if image_shape is None else image_shape
    if data_dir is not None:
        if source.read is not None:
            return source.read(os.fspath(data_dir), shape, settings)
        raise UsageError(
            f"data set {name!r} reads no data_dir ({source.refusal}): leave data_dir out"
        )
    if source.built_in is not None:
        return source.built_in()
    if source.classes == 0:
        raise UsageError(f"data set {name!r} has to be read: give its data_dir")
    return synthetic.load(
        name,
        shape,
        source.classes if classes is None else classes,
        examples=examples,
        seed=seed,
    )
