"""Small images in memory, a byte for each channel of a pixel, made into floats as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import shuffled
from minidist.data.preprocess.draws import CROPS, key
from minidist.errors import ShapeError
from minidist.kernels import image as kernel


@dataclass(frozen=True)
class Pixels:
    """A Split of images uint8 [n, height, width, channels] and their labels int64 [n].

    Inputs are pixel * scale + shift, float32, by default pixel / 127.5 - 1; scale and shift may
    also be given for each channel. With `pad` images are distorted: each gets so many black pixels
    on each side, a part of its own size is taken at a random place, and half of them are mirrored.

    Raises ShapeError when the two do not have these dtypes and dimensions or differ in length.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    pad: int | None = None
    scale: Any = 1 / 127.5
    shift: Any = -1.0

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != np.uint8 or images.ndim != 4 or not images.flags.c_contiguous:
            raise ShapeError(
                "images must be uint8 [n, height, width, channels], C-contiguous, but they are "
                f"{images.dtype} {list(images.shape)}"
            )
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            raise ShapeError(
                f"labels must be int64 [{len(images)}], one for each image, but they are "
                f"{labels.dtype} {list(labels.shape)}"
            )
        for name in ("scale", "shift"):
            each = np.broadcast_to(np.float32(getattr(self, name)), images.shape[3:])
            object.__setattr__(self, name, np.ascontiguousarray(each))

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

    @property
    def grain(self) -> int:
        return max(1, 2**19 // max(1, self.images[:1].size))

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return shuffled(len(self), seed, epoch)

    def read(
        self,
        numbers: NDArray[np.int64],
        seed: int,
        epoch: int,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
    ) -> None:
        self.labels.take(numbers, out=labels, mode="clip")
        pad = -1 if self.pad is None else self.pad
        counter = epoch % 2**32, CROPS
        kernel.crop(self.images, numbers, self.scale, self.shift, inputs, pad, key(seed), counter)
