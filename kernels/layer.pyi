from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.floating[Any]]

def relu(x: _Array, y: _Array, *, threads: int = 1) -> None: ...
def relu_backward(dy: _Array, y: _Array, dx: _Array, *, threads: int = 1) -> None: ...
def relu6(x: _Array, y: _Array, *, threads: int = 1) -> None: ...
def relu6_backward(dy: _Array, y: _Array, dx: _Array, *, threads: int = 1) -> None: ...
def philox(key: Sequence[int], counter: Sequence[int]) -> tuple[int, int, int, int]: ...
def uniform(
    out: _Array, key: Sequence[int], counter: Sequence[int], *, threads: int = 1
) -> None: ...
def dropout(
    x: _Array,
    y: _Array,
    rate: float,
    key: Sequence[int],
    counter: Sequence[int],
    *,
    threads: int = 1,
) -> None: ...
def softmax_cross_entropy(
    logits: _Array,
    labels: NDArray[np.int64],
    losses: _Array,
    dlogits: _Array,
    *,
    threads: int = 1,
) -> None: ...
def im2col(
    x: _Array,
    columns: _Array,
    kh: int,
    kw: int,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def col2im(
    columns: _Array,
    dx: _Array,
    kh: int,
    kw: int,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def max_pool(
    x: _Array,
    y: _Array,
    argmax: NDArray[np.int32],
    kh: int,
    kw: int,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def max_pool_backward(
    dy: _Array,
    argmax: NDArray[np.int32],
    dx: _Array,
    kh: int,
    kw: int,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def average_pool(
    x: _Array,
    y: _Array,
    kh: int,
    kw: int,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
def average_pool_backward(
    dy: _Array,
    dx: _Array,
    kh: int,
    kw: int,
    stride_h: int,
    stride_w: int,
    pad_top: int,
    pad_left: int,
    *,
    threads: int = 1,
) -> None: ...
