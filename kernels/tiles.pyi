from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

def has_tiles() -> bool: ...
def multiply(
    a: NDArray[Any],
    b: NDArray[Any],
    c: NDArray[Any],
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> None: ...

class Convolution:
    def __init__(
        self,
        *,
        x: Sequence[int],
        w: Sequence[int],
        y: Sequence[int],
        strides: Sequence[int],
        before: Sequence[int],
    ) -> None: ...
    @property
    def can_forward(self) -> bool: ...
    @property
    def can_backward_input(self) -> bool: ...
    @property
    def can_backward_filter(self) -> bool: ...
    def forward(self, x: NDArray[Any], w: NDArray[Any], *more: NDArray[Any]) -> None: ...
    def backward_input(self, dy: NDArray[Any], w: NDArray[Any], dx: NDArray[Any]) -> None: ...
    def backward_filter(self, x: NDArray[Any], dy: NDArray[Any], dw: NDArray[Any]) -> None: ...
