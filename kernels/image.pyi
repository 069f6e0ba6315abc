from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

METHODS: dict[str, int]

def crop(
    images: NDArray[np.uint8],
    numbers: NDArray[np.int64],
    scale: NDArray[np.float32],
    shift: NDArray[np.float32],
    out: NDArray[Any],
    pad: int = -1,
    key: Sequence[int] = (0, 0),
    counter: Sequence[int] = (0, 0),
) -> None: ...
def resize(
    image: NDArray[np.uint8],
    method: str,
    scale: NDArray[np.float32],
    shift: NDArray[np.float32],
    out: NDArray[Any],
    whole: tuple[int, int] | None = None,
    top: int = 0,
    left: int = 0,
    mirrored: bool = False,
) -> None: ...
def distort(
    pixels: NDArray[Any],
    scale: NDArray[np.float32],
    shift: NDArray[np.float32],
    brightness: float,
    contrast: float,
    saturation: float,
    hue: float,
    matrix: NDArray[np.float32] | None = None,
    contrast_first: bool = False,
) -> None: ...
