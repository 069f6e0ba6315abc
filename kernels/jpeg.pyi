from typing import Any

import numpy as np
from numpy.typing import NDArray

class Damaged(ValueError):
    byte: int

class Jpeg:
    def __init__(self, content: Any) -> None: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def supported(self) -> bool: ...
    def decode(self, out: NDArray[np.uint8], top: int = 0, left: int = 0) -> None: ...
