"""What happens to an encoded image before a model sees it: decoded, cropped, resized, distorted.

    preprocessor = make(Settings(), (224, 224, 3), train=True)
    preprocessor(encoded, seed, epoch, number, out)     # out: float32 [224, 224, 3]

What is drawn at random follows from (seed, epoch, number) alone; see `draws.py`. `decode.py` turns
bytes into pixels, `boxes.py` says which of them, `colour.py` draws what happens to their colours,
and `imagenet.py` puts these together.
"""

from __future__ import annotations

from minidist.data.preprocess.imagenet import Official, Preprocessor, Standard
from minidist.data.preprocess.settings import PREPROCESSORS, RESIZE_METHODS, Settings

__all__ = ["PREPROCESSORS", "RESIZE_METHODS", "Preprocessor", "Settings", "make"]


def make(settings: Settings, shape: tuple[int, ...], train: bool) -> Preprocessor:
    """Return what turns encoded images into inputs of that shape, (height, width, 3).

    train: crop, flip and distort at random; else the middle of each image is taken.
    """
    height, width, _ = shape
    kind = Official if settings.input_preprocessor == "official_models_imagenet" else Standard
    return kind(settings, height, width, train)
