"""Examples as a model is fed them: of images a picture, with a row for each, and of texts lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Dataset, Split
from minidist.errors import UsageError
from minidist.tensor_file import replacing

TILE = 64  # pixels that an image has on each side of the picture at least
GAP = 4  # white ones between images

Pixels = NDArray[np.uint8]


def show(
    dataset: Dataset,
    split: Split,
    picture: Path | None,
    say: Callable[[str], None],
    examples: int,
    epochs: int,
    seed: int,
) -> None:
    """Show the first examples of epoch 0, as the seed shuffles it, and say which they are.

    Of images the picture, a PNG file, has a column for each of so many epochs, in which they may be
    cropped and distorted in other ways. Texts are said, as they are in epoch 0; they need none.

    Raises UsageError where a picture is missing, or no picture can show the images, or there is no
    Pillow to make it; DataError where it cannot be written, or an example is damaged.
    """
    images = split.label_shape == ()
    if images != (picture is not None):
        need = "name the PNG file to show them in" if images else "no picture shows them"
        raise UsageError(f"{dataset.name} has {'images' if images else 'texts'}: {need}")
    numbers = split.order(seed, 0)[:examples]
    rows = []
    for epoch in range(epochs):
        inputs = np.empty((len(numbers), *split.shape), split.dtype)
        labels = np.empty((len(numbers), *split.label_shape), np.int64)
        split.read(numbers, seed, epoch, inputs, labels)
        rows.append(inputs)
    if picture is None:
        for number, text in zip(numbers, rows[0], strict=True):
            say(f"{number}\t{text.astype(np.uint8).tobytes()!r}")
        return
    _save(_picture(np.stack(rows, axis=1)), picture)
    for number, label in zip(numbers, labels, strict=True):
        name = f"\t{dataset.names[label]}" if dataset.names else ""
        say(f"{number}\tlabel {label}{name}")


def _picture(images: NDArray[Any]) -> Pixels:
    """Return images [rows, columns, height, width, channels] as one, [height, width, 3].

    Pixels of -1 to 1 are black to white, and some that are resized lie a little beyond. Where
    they are much larger the means of the channels were subtracted from bytes.
    """
    rows, _, height, width, channels = images.shape
    if channels not in (1, 3):
        raise UsageError(f"a picture has 1 or 3 channels, and these images have {channels}")
    low, high = (-1, 1) if np.abs(images).max(initial=0) < 2 else (-124, 152)
    pixels = np.rint((images.clip(low, high) - low) * (255 / (high - low))).astype(np.uint8)
    times = -(-TILE // min(height, width))
    pixels = pixels.repeat(times, axis=2).repeat(times, axis=3)
    ends = ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0))
    pixels = np.pad(pixels, ends, constant_values=255)
    pixels = pixels.swapaxes(1, 2).reshape(rows * pixels.shape[2], -1, channels)
    return np.broadcast_to(pixels[:-GAP, :-GAP], (*pixels[:-GAP, :-GAP].shape[:2], 3))


def _save(pixels: Pixels, path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UsageError(f"{path}: the picture is a PNG file: let its name end in .png")
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("a picture needs Pillow: pip install 'minidist[images]'") from None
    with replacing(path) as file:
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
