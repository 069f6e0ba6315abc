"""What a data set is: examples to train on, examples to test on, and the number of classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minidist.errors import ShapeError


@dataclass(frozen=True)
class Examples:
    """Images float32 [n, height, width, channels], about -1 to 1, and their labels int64 [n].

    Raises ShapeError when the two do not have these dtypes and dimensions or differ in length.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != np.float32 or images.ndim != 4:
            raise ShapeError(
                "images must be float32 [n, height, width, channels], but they are "
                f"{images.dtype} {list(images.shape)}"
            )
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            raise ShapeError(
                f"labels must be int64 [{len(images)}], one for each image, but they are "
                f"{labels.dtype} {list(labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A named data set; `synthetic` says that its images are random and nothing can be learnt."""

    name: str
    train: Examples
    test: Examples
    classes: int
    synthetic: bool

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        _, height, width, channels = self.train.images.shape
        return height, width, channels


def scale_pixels(pixels: NDArray[np.uint8], out: NDArray[np.float32], brightest: int = 255) -> None:
    """Write pixels 0..brightest, scaled to -1..1, into `out` of the same shape."""
    np.divide(pixels, np.float32(brightest / 2), out=out)
    out -= 1
