import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float32]

def can_filter_gradient(filters: int) -> bool: ...
def filter_gradient(
    x: _Array,
    dy: _Array,
    dw: _Array,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
) -> None: ...
