"""Encoded images: their size, and the pixels of a part of them.

JPEGs are decoded by kernels.jpeg, and only as far as they are needed; what else there is, such as
PNG and JPEGs in CMYK, by Pillow.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from minidist.data.preprocess.boxes import Box
from minidist.device import host
from minidist.errors import ImageError, UsageError
from minidist.kernels.jpeg import Damaged, Jpeg

START_OF_JPEG = b"\xff\xd8"
LARGEST = 2**26  # pixels of an image of another kind: a few bytes may say that there are any number


class Encoded:
    """An image in the bytes of a file. Raises ImageError where these do not begin like one."""

    def __init__(self, content: bytes) -> None:
        self._jpeg: Jpeg | None = None
        if content[:2] == START_OF_JPEG:
            try:
                self._jpeg = Jpeg(content)
            except Damaged as error:
                raise ImageError(error.byte, f"this JPEG is damaged: {error}") from None
        if self._jpeg is not None and self._jpeg.supported:
            self.height, self.width = self._jpeg.height, self._jpeg.width
        else:
            self._jpeg = None
            self._image = _by_pillow(content)
            self.height, self.width, _ = self._image.shape

    def pixels(self, box: Box) -> NDArray[np.uint8]:
        """Return that part of the image, red, green and blue: uint8 [height, width, 3]. Call once.

        Raises ImageError where what is needed for it is damaged.
        """
        top, left, height, width = box
        pixels: NDArray[np.uint8] = host().allocate((height, width, 3), np.uint8)
        if self._jpeg is None:
            pixels[...] = self._image[top : top + height, left : left + width]
            return pixels
        try:
            self._jpeg.decode(pixels, top, left)
        except Damaged as error:
            raise ImageError(error.byte, f"this JPEG is damaged: {error}") from None
        return pixels


def _by_pillow(content: bytes) -> NDArray[np.uint8]:
    """Return all pixels of an image of another kind."""
    try:
        from PIL import Image
    except ImportError:
        # Not an ImageError: the image is good, and must not be skipped as one that is damaged.
        raise UsageError(
            "there is an image that is no JPEG that minidist decodes itself, and Pillow, which "
            "knows more kinds, is not installed: pip install 'minidist[images]'"
        ) from None
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            if width * height > LARGEST:
                raise ImageError(0, f"{width}×{height} pixels are more than {LARGEST}")
            if image.mode.startswith(("I", "F")):  # Pillow would cut off what is above 255
                raise ImageError(0, f"its pixels ({image.mode}) have more than 8 bits")
            return np.asarray(image.convert("RGB"))
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise ImageError(0, f"this is no image that can be read: {error}") from error
