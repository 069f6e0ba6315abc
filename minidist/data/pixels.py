"""Small images in memory, a byte for each channel of a pixel, made into floats as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import InMemory
from minidist.data.preprocess.draws import CROPS, key
from minidist.errors import ShapeError
from minidist.kernels import image as kernel


@dataclass(frozen=True)
class Pixels(InMemory):
    """A Split of images uint8 [n, height, width, channels] and their labels int64 [n].

    Inputs are pixel * scale + shift, float32, by default pixel / 127.5 - 1; scale and shift may
    also be given for each channel. With `pad` images are distorted: each gets so many black pixels
    on each side, a part of its own size is taken at a random place, and half of them are mirrored.

    Raises ShapeError for images that are not C-contiguous, too.
    """

    stored: ClassVar[str] = "uint8"

    pad: int | None = None
    scale: Any = 1 / 127.5
    shift: Any = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.images.flags.c_contiguous:
            raise ShapeError("images must be C-contiguous: take np.ascontiguousarray of them")
        for name in ("scale", "shift"):
            each = np.broadcast_to(np.float32(getattr(self, name)), self.images.shape[3:])
            object.__setattr__(self, name, np.ascontiguousarray(each))

    @property
    def grain(self) -> int:
        return max(1, 2**19 // max(1, self.images[:1].size))

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
