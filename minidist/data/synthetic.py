"""Made-up images of any shape, for speed without files: nothing can be learnt from them."""

from __future__ import annotations

import numpy as np

from minidist.data.dataset import Dataset, Examples
from minidist.errors import UsageError

EXAMPLES = 512


def load(
    name: str,
    image_shape: tuple[int, ...],
    classes: int,
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
) -> Dataset:
    """Return `examples` images to train on and a quarter as many to test on, labels at random.

    Pixels are the ancestor's: normal around 127 with deviation 60, those beyond two deviations
    drawn again, then scaled as all pixels are (x / 127.5 - 1). Labels are uniform over all
    classes. Both follow from `seed` alone.

    Raises UsageError for sizes below one.
    """
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise UsageError(
            f"image_shape must be three sizes of at least 1 (height, width, channels), but it is "
            f"{image_shape}"
        )
    limits = [("classes", classes, 1), ("examples", examples, 1), ("seed", seed, 0)]
    for what, value, least in limits:
        if value < least:
            raise UsageError(f"{what} of synthetic data must be at least {least}, but is {value}")
    generator = np.random.Generator(np.random.Philox(seed))
    return Dataset(
        name,
        train=_examples(generator, examples, image_shape, classes),
        test=_examples(generator, max(1, examples // 4), image_shape, classes),
        classes=classes,
        synthetic=True,
    )


def _examples(
    generator: np.random.Generator, count: int, image_shape: tuple[int, ...], classes: int
) -> Examples:
    images = generator.standard_normal((count, *image_shape), dtype=np.float32)
    pixels = images.reshape(-1)  # a view
    outside = np.flatnonzero(np.abs(pixels) > 2)
    while outside.size:
        pixels[outside] = generator.standard_normal(outside.size, dtype=np.float32)
        outside = outside[np.abs(pixels[outside]) > 2]
    images *= np.float32(60 / 127.5)
    images += np.float32(127 / 127.5 - 1)
    return Examples(images, generator.integers(classes, size=count, dtype=np.int64))
