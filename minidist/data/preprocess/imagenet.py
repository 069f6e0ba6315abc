"""Encoded images of any size, into inputs of one size: two ways, each for training and testing.

| `input_preprocessor`       | to test on: resized so that                    | pixels become      |
|----------------------------|------------------------------------------------|--------------------|
| `default`                  | the middle is 1 / 1.145 of it                  | pixel / 127.5 - 1  |
| `official_models_imagenet` | the shorter side is 256 for 224, or in between | pixel - the mean's |

To train on, both take a random part (`boxes.py`), which may change its aspect, and mirror half of
them; only the first distorts colours (`colour.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from minidist.data.preprocess.boxes import Box, random_box
from minidist.data.preprocess.colour import distort
from minidist.data.preprocess.decode import Encoded
from minidist.data.preprocess.draws import draws
from minidist.data.preprocess.settings import Settings
from minidist.kernels import image as kernel


class Preprocessor(ABC):
    """Turns encoded images into inputs; any number of threads may use it."""

    scale: ClassVar[NDArray[np.float32]]
    shift: ClassVar[NDArray[np.float32]]

    def __init__(self, settings: Settings, height: int, width: int, train: bool) -> None:
        self._settings = settings
        self._height, self._width = height, width
        self._train = train

    def __call__(
        self, content: bytes, seed: int, epoch: int, number: int, out: NDArray[Any]
    ) -> None:
        """Write the image that `content` encodes into out, float32 [height, width, 3].

        Raises ImageError for one that is damaged or of an unknown kind.
        """
        encoded = Encoded(content)
        method = self._settings.method_for(number)
        if self._train:
            self._crop(encoded, method, number, draws(seed, epoch, number), out)
            return
        rows, columns = self._resized(encoded.height, encoded.width)
        top, left = (rows - self._height) // 2, (columns - self._width) // 2
        pixels = encoded.pixels(Box(0, 0, encoded.height, encoded.width))
        kernel.resize(pixels, method, self.scale, self.shift, out, (rows, columns), top, left)

    def _crop(
        self, encoded: Encoded, method: str, number: int, chance: Iterator[float], out: NDArray[Any]
    ) -> None:
        pixels = encoded.pixels(random_box(encoded.height, encoded.width, chance))
        mirrored = next(chance) < 0.5
        kernel.resize(pixels, method, self.scale, self.shift, out, mirrored=mirrored)

    @abstractmethod
    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the size, from an image's, whose middle is taken to test on."""


class Standard(Preprocessor):
    """The ancestor's own preprocessing of ImageNet."""

    scale = np.full(3, 1 / 127.5, np.float32)
    shift = np.full(3, -1, np.float32)

    def _crop(
        self, encoded: Encoded, method: str, number: int, chance: Iterator[float], out: NDArray[Any]
    ) -> None:
        if not self._settings.distortions:
            super()._crop(encoded, method, number, chance, out)
            return
        pixels = encoded.pixels(random_box(encoded.height, encoded.width, chance))
        mirrored = next(chance) < 0.5
        kernel.resize(pixels, method, _TO_ONE, _ZERO, out, mirrored=mirrored)
        distort(
            out,
            _TWO,
            self.shift,
            chance,
            in_yiq=self._settings.distort_color_in_yiq,
            contrast_first=number % 2 == 1,
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        ratio = 1.145 * max(self._height / height, self._width / width)
        return max(int(height * ratio), self._height), max(int(width * ratio), self._width)


class Official(Preprocessor):
    """That of TensorFlow's official models."""

    scale = np.ones(3, np.float32)
    shift = -np.array([123.68, 116.78, 103.94], np.float32)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        side = 256 * max(self._height, self._width) / 224
        ratio = side / min(height, width)
        return max(int(height * ratio), self._height), max(int(width * ratio), self._width)


_ZERO = np.zeros(3, np.float32)
_TO_ONE = np.full(3, 1 / 255, np.float32)
_TWO = np.full(3, 2, np.float32)
