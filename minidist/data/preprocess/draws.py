"""Random numbers of one example in one epoch: whoever reads it, they are the same.

Philox's key is the seed's two words. Of its counter the first word counts, the second is the
example's number, the third the epoch, and the fourth sets these numbers apart from those of layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidist.kernels import layer

BLOCK = 32  # numbers that are made at a time; few images need more
CROPS = 0x494D0000  # the fourth word for images in memory, whose numbers kernels.image makes
IMAGES = 0x494D0001  # the fourth word for encoded images; further blocks count on


def key(seed: int) -> tuple[int, int]:
    """Return the two words of a seed below 2**64."""
    return seed % 2**32, seed >> 32


def draws(seed: int, epoch: int, number: int) -> Iterator[float]:
    """Give numbers, evenly distributed in [0, 1), without an end."""
    values = np.empty(BLOCK, np.float64)
    block = IMAGES
    while True:
        layer.uniform(values, key(seed), (number % 2**32, epoch % 2**32, block))
        yield from values.tolist()
        block += 1
