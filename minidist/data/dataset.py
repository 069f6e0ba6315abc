"""What a data set is: examples to train on, examples to test on, and the number of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from minidist.errors import ShapeError


class Split(Protocol):
    """A part of a data set: examples by number, from 0, each an input and its label.

    What an example looks like as it is fed follows from its number, the seed and the epoch alone,
    so that it is the same in whatever thread or process it is read.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one input: (height, width, channels) of an image, (tokens,) of a text."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the inputs: float32 of images, int64 of texts."""
        ...

    @property
    def label_shape(self) -> tuple[int, ...]:
        """That of one label, which is int64: () of an image's class, (tokens,) of a text."""
        ...

    @property
    def grain(self) -> int:
        """How many examples are worth a thread's while at a time."""
        ...

    def __len__(self) -> int: ...

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return all numbers, int64 [n], in the order of an epoch that is shuffled."""
        ...

    def read(
        self,
        numbers: NDArray[np.int64],
        seed: int,
        epoch: int,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
    ) -> None:
        """Write the examples of numbers [k] into inputs [k, *shape] and labels [k, *label_shape].

        Both are C-contiguous. Any number of threads may read at a time.
        """
        ...


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the Philox generator of key (seed, epoch), which orders that epoch."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))


@runtime_checkable
class Skipping(Protocol):
    """A Split whose records may be damaged, so that others stand in for them."""

    @property
    def skipped(self) -> list[int]:
        """Their numbers, so far; below 0 those of files that are cut off."""
        ...


def skipped(split: Split) -> list[int]:
    """Return the numbers of the records that others have stood in for so far."""
    return split.skipped if isinstance(split, Skipping) else []


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to count - 1, as an epoch is ordered."""
    return generator(seed, epoch).permutation(count)


@dataclass(frozen=True)
class InMemory:
    """What Splits in memory have in common: images of one size and their labels int64 [n].

    Raises ShapeError when the two do not have the right dtypes and dimensions or differ in length.
    """

    images: NDArray[Any]  # [n, height, width, channels]
    labels: NDArray[np.int64]

    stored: ClassVar[str]  # the dtype of the images

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != self.stored or images.ndim != 4:
            raise ShapeError(
                f"images must be {self.stored} [n, height, width, channels], but they are "
                f"{images.dtype} {list(images.shape)}"
            )
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            raise ShapeError(
                f"labels must be int64 [{len(images)}], one for each image, but they are "
                f"{labels.dtype} {list(labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    @property
    def label_shape(self) -> tuple[int, ...]:
        return ()

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return shuffled(len(self), seed, epoch)


class Examples(InMemory):
    """A Split in memory: images float32 [n, height, width, channels] and their labels int64 [n].

    Pixels are about -1 to 1, and fed as they are.
    """

    stored: ClassVar[str] = "float32"

    @property
    def grain(self) -> int:
        return max(1, 2**18 // max(1, self.images[:1].nbytes))

    def read(
        self,
        numbers: NDArray[np.int64],
        seed: int,
        epoch: int,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
    ) -> None:
        # Under mode="raise" NumPy would gather into an array of its own first.
        self.images.take(numbers, axis=0, out=inputs, mode="clip")
        self.labels.take(numbers, out=labels, mode="clip")


@dataclass(frozen=True)
class Dataset:
    """A named data set; `synthetic` says that its images are random and nothing can be learnt.

    names: of the classes, in order, where they are known.
    """

    name: str
    train: Split
    test: Split
    classes: int
    synthetic: bool
    names: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What has a label, and is counted where speeds are told: images, or tokens of a text."""
        return "tokens" if self.train.label_shape else "images"

    @property
    def skipped(self) -> dict[str, list[int]]:
        """The numbers of the records that could not be read so far, by part."""
        return {"train": skipped(self.train), "test": skipped(self.test)}

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        height, width, channels = self.train.shape
        return height, width, channels


def scale_pixels(pixels: NDArray[np.uint8], out: NDArray[np.float32], brightest: int = 255) -> None:
    """Write pixels 0..brightest, scaled to -1..1, into `out` of the same shape."""
    np.divide(pixels, np.float32(brightest / 2), out=out)
    out -= 1
