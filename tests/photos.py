"""Small JPEG files for tests: a folder of them by class, as one would sort photographs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def jpeg(number: int, size: tuple[int, int] = (24, 20)) -> bytes:
    """Return a JPEG of that height and width; each number has an image of its own."""
    y, x = np.mgrid[: size[0], : size[1]]
    pixels = np.stack([40 * number + x + y, 200 - 7 * x + number, 9 * y], axis=-1) % 256
    return encoded(pixels.astype(np.uint8))


def encoded(pixels: NDArray[np.uint8]) -> bytes:
    """Return the JPEG of pixels [h, w, 3] or [h, w]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def album(path: Path, train: dict[str, int], test: dict[str, int], held_out: str = "val") -> Path:
    """Write a folder with so many images of each class in its two parts; return its path."""
    number = 0
    for part, classes in (("train", train), (held_out, test)):
        for name, count in classes.items():
            (path / part / name).mkdir(parents=True)
            for i in range(count):
                (path / part / name / f"{i:03}.jpg").write_bytes(jpeg(number))
                number += 1
    return path
