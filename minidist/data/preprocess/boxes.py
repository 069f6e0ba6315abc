"""Which part of an image is taken: a random one to train on, the middle to test on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

SMALLEST = 0.1  # of the image's area; the ancestor draws from 0.05 on and then rejects below this
ASPECTS = 0.75, 1.33  # width by height
ATTEMPTS = 100


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_box(height: int, width: int, draws: Iterator[float]) -> Box:
    """Draw a part of an image: first its aspect, then its height, then its place.

    Heights are evenly distributed over those that give from a twentieth of the area to all of it,
    as far as the image is wide enough; a part of less than SMALLEST is drawn again. So does
    TensorFlow's sample_distorted_bounding_box for an image without boxes, as the ancestor calls it.
    After ATTEMPTS it is the whole image.
    """
    area = height * width
    for _ in range(ATTEMPTS):
        low, high = ASPECTS
        aspect = low + (high - low) * next(draws)
        shortest = round(math.sqrt(0.05 * area / aspect))
        tallest = min(height, round(math.sqrt(area / aspect)), int((width + 0.5) / aspect))
        tall = min(shortest, tallest)
        tall += int(next(draws) * (tallest - tall + 1))
        wide = min(round(tall * aspect), width)
        if tall >= 1 and wide >= 1 and tall * wide >= SMALLEST * area:
            top = int(next(draws) * (height - tall + 1))
            left = int(next(draws) * (width - wide + 1))
            return Box(top, left, tall, wide)
    return Box(0, 0, height, width)
