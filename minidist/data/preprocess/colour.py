"""Colours of images to train on: brighter or darker, with other contrast, saturation and hue."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.kernels import image as kernel

# FCC NTSC of 1953, as TensorFlow's adjust_hsv_in_yiq has it.
YIQ_OF_RGB = np.array(
    [[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]], np.float64
)
RGB_OF_YIQ = np.linalg.inv(YIQ_OF_RGB)


def distort(
    pixels: NDArray[Any],
    scale: NDArray[np.float32],
    shift: NDArray[np.float32],
    draws: Iterator[float],
    *,
    in_yiq: bool,
    contrast_first: bool,
) -> None:
    """Distort the colours of pixels float32 [..., 3], 0 to 1, in place; then x * scale + shift.

    The ancestor's ranges: brightness ±32/255, contrast and saturation 0.5 to 1.5, hue ±0.2 turns in
    HSV and ±0.2·π in YIQ.
    """
    brightness = (2 * next(draws) - 1) * 32 / 255
    contrast = 0.5 + next(draws)
    saturation = 0.5 + next(draws)
    turn = 0.2 * (2 * next(draws) - 1)
    matrix = _in_yiq(saturation, math.pi * turn) if in_yiq else None
    kernel.distort(
        pixels, scale, shift, brightness, contrast, saturation, turn, matrix, contrast_first
    )


def _in_yiq(saturation: float, angle: float) -> NDArray[np.float32]:
    """Return the matrix that turns the plane of I and Q, and stretches it."""
    cosine, sine = saturation * math.cos(angle), saturation * math.sin(angle)
    turned = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    matrix: NDArray[np.float32] = (RGB_OF_YIQ @ turned @ YIQ_OF_RGB).astype(np.float32)
    return matrix
