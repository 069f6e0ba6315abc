from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.floating[Any]]

def forward(
    x: _Array,
    w: _Array,
    y: _Array,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def backward_input(
    dy: _Array,
    w: _Array,
    dx: _Array,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def backward_filter(
    x: _Array,
    dy: _Array,
    dw: _Array,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
