from typing import Any

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.floating[Any]]

def bias(x: _Array, bias: _Array, y: _Array, *, relu: bool = False, threads: int = 1) -> None: ...
def bias_backward(
    dy: _Array,
    dbias: _Array,
    y: _Array | None = None,
    dz: _Array | None = None,
    *,
    threads: int = 1,
) -> None: ...
def moments(x: _Array, mean: _Array, variance: _Array, *, threads: int = 1) -> None: ...
def normalize(
    x: _Array,
    mean: _Array,
    variance: _Array,
    scale: _Array,
    offset: _Array,
    epsilon: float,
    y: _Array,
    add: _Array | None = None,
    *,
    relu: bool = False,
    threads: int = 1,
) -> None: ...
def normalize_backward(
    dy: _Array,
    x: _Array,
    mean: _Array,
    variance: _Array,
    scale: _Array,
    epsilon: float,
    moments: bool,
    dx: _Array,
    dscale: _Array,
    doffset: _Array,
    y: _Array | None = None,
    dz: _Array | None = None,
    *,
    threads: int = 1,
) -> None: ...
