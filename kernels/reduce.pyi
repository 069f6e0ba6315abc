from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Tensors = Sequence[NDArray[Any]]  # np.floating, and what else is given also ml_dtypes.bfloat16

def sum(
    destinations: Sequence[_Tensors],
    sources: Sequence[_Tensors],
    *,
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    threads: int = 1,
) -> None: ...
def alike(rows: Sequence[Sequence[Any]]) -> bool: ...
def cast(destinations: _Tensors, sources: _Tensors, *, threads: int = 1) -> None: ...
def offsets(shapes: Iterable[Sequence[int]], itemsize: int) -> tuple[list[int], int]: ...
def pack(
    flat: NDArray[np.floating[Any]],
    tensors: _Tensors,
    offsets: Sequence[int],
    *,
    threads: int = 1,
) -> None: ...
def unpack(
    tensors: _Tensors,
    flat: NDArray[np.floating[Any]],
    offsets: Sequence[int],
    *,
    threads: int = 1,
) -> None: ...
def first_nonfinite(tensors: _Tensors, *, threads: int = 1) -> int: ...
def sum_squares(tensors: _Tensors, *, threads: int = 1) -> float: ...
