from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

class Primitive:
    @property
    def implementation(self) -> str: ...
    def run(self, *arrays: NDArray[Any]) -> None: ...

class Convolution:
    def __init__(
        self,
        x: Sequence[int],
        w: Sequence[int],
        y: Sequence[int],
        strides: Sequence[int],
        before: Sequence[int],
        after: Sequence[int],
        own_layout: bool,
        narrow: bool,
        has_bias: bool,
        threads: int,
    ) -> None: ...
    def forward(self) -> Primitive | None: ...
    def backward_input(self) -> Primitive | None: ...
    def backward_filter(self) -> Primitive | None: ...

def matmul(
    n: int, k: int, m: int, transpose_a: bool, transpose_b: bool, threads: int
) -> Primitive | None: ...
def sgemm(
    a: NDArray[Any],
    b: NDArray[Any],
    c: NDArray[Any],
    n: int,
    k: int,
    m: int,
    transpose_a: bool,
    transpose_b: bool,
    threads: int,
) -> None: ...
def version() -> str: ...
def has_avx2() -> bool: ...
