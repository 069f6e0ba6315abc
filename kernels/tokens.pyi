from typing import Any

from numpy.typing import NDArray

_Array = NDArray[Any]

def gelu(x: _Array, y: _Array, *, threads: int = 1) -> None: ...
def gelu_backward(dy: _Array, x: _Array, dx: _Array, *, threads: int = 1) -> None: ...
def layer_norm(
    x: _Array, scale: _Array, offset: _Array, epsilon: float, y: _Array, *, threads: int = 1
) -> None: ...
def layer_norm_backward(
    dy: _Array,
    x: _Array,
    scale: _Array,
    epsilon: float,
    dx: _Array,
    dscale: _Array,
    doffset: _Array,
    *,
    threads: int = 1,
) -> None: ...
