"""Data sets by name: digits, mnist, cifar10, imagenet and synthetic images, and their batches.

| name      | without data_dir                       | with data_dir                            |
|-----------|----------------------------------------|------------------------------------------|
| digits    | the 1,797 real digits of this package  | refused: it reads no folder              |
| mnist     | synthetic, 28×28×1, 10 classes         | MNIST's four IDX files, plain or gzip    |
| cifar10   | synthetic, 32×32×3, 10 classes         | CIFAR-10's binary version, six .bin files|
| imagenet  | synthetic, 224×224×3, 1001 classes     | refused: no reader for it                |
| synthetic | synthetic, 224×224×3, 1001 classes     | refused: it reads no folder              |

`image_shape` and `classes` replace the synthetic numbers of this table and are refused for real
data, whose files say them. Pixels are float32, about -1 to 1, in NHWC order; labels are int64 from
0 to classes - 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from minidist.data import cifar10, digits, mnist, synthetic
from minidist.data.batches import Batches
from minidist.data.dataset import Dataset, Examples
from minidist.errors import UsageError

__all__ = ["SOURCES", "Batches", "Dataset", "Examples", "load"]


class Source(NamedTuple):
    """Where a data set comes from without and with a data_dir, and what it looks like."""

    image_shape: tuple[int, int, int]
    classes: int
    built_in: Callable[[], Dataset] | None = None  # None: synthetic images of this shape
    read: Callable[[str], Dataset] | None = None  # None: no data_dir can be read
    refusal: str = ""


SOURCES = {
    "digits": Source((8, 8, 1), 10, built_in=digits.load, refusal="it comes with minidist"),
    "mnist": Source((28, 28, 1), 10, read=mnist.load),
    "cifar10": Source((32, 32, 3), 10, read=cifar10.load),
    "imagenet": Source((224, 224, 3), 1001, refusal="there is no reader of ImageNet files yet"),
    "synthetic": Source((224, 224, 3), 1001, refusal="its images are made up"),
}


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    examples: int = synthetic.EXAMPLES,
    seed: int = 0,
) -> Dataset:
    """Load the data set of that name; the module's table says what each is.

    `examples` is how many a synthetic training part has (a benchmark needs no more than one global
    batch, used again and again, as the ancestor does); `seed` chooses the synthetic numbers. Real
    data depend on neither.

    Raises UsageError for an unknown name or an argument that the set does not take, DataError for
    files that are missing or not what they should be.
    """
    source = SOURCES.get(name)
    if source is None:
        raise UsageError(f"data set {name!r} is unknown: choose one of {', '.join(SOURCES)}")
    if data_dir is not None and source.read is None:
        raise UsageError(
            f"data set {name!r} reads no data_dir ({source.refusal}): leave data_dir out"
        )
    real = source.built_in is not None or data_dir is not None
    if real and (image_shape is not None or classes is not None):
        raise UsageError(
            f"image_shape and classes shape synthetic images only, but {name!r} here is real data: "
            "leave them out"
        )
    if data_dir is not None and source.read is not None:
        return source.read(os.fspath(data_dir))
    if source.built_in is not None:
        return source.built_in()
    return synthetic.load(
        name,
        source.image_shape if image_shape is None else image_shape,
        source.classes if classes is None else classes,
        examples=examples,
        seed=seed,
    )
