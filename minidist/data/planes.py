"""Images as planes, channels first, of a part of a data set that gives them channels last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Split, skipped
from minidist.device import host


@dataclass(frozen=True)
class Planes:
    """The Split `of`, with inputs [channels, height, width], not [height, width, channels]."""

    of: Split

    def __len__(self) -> int:
        return len(self.of)

    @property
    def shape(self) -> tuple[int, ...]:
        height, width, channels = self.of.shape
        return channels, height, width

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.of.dtype

    @property
    def label_shape(self) -> tuple[int, ...]:
        return self.of.label_shape

    @property
    def skipped(self) -> list[int]:
        return skipped(self.of)

    @property
    def grain(self) -> int:
        return self.of.grain

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.of.order(seed, epoch)

    def read(
        self,
        numbers: NDArray[np.int64],
        seed: int,
        epoch: int,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
    ) -> None:
        images = host().allocate((len(numbers), *self.of.shape), self.dtype)
        self.of.read(numbers, seed, epoch, images, labels)
        np.copyto(inputs, images.transpose(0, 3, 1, 2))
