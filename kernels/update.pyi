from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Tensors = Sequence[NDArray[np.floating[Any]]]

def sgd(
    weights: _Tensors,
    gradients: _Tensors,
    *,
    lr: float,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = ...,
    copies: Sequence[_Tensors] = ...,
    others: Sequence[_Tensors] = ...,
    counts: Sequence[float] | None = ...,
    threads: int = 1,
) -> None: ...
def momentum(
    weights: _Tensors,
    gradients: _Tensors,
    momenta: _Tensors,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = ...,
    copies: Sequence[_Tensors] = ...,
    others: Sequence[_Tensors] = ...,
    counts: Sequence[float] | None = ...,
    threads: int = 1,
) -> None: ...
def rmsprop(
    weights: _Tensors,
    gradients: _Tensors,
    squares: _Tensors,
    momenta: _Tensors,
    *,
    lr: float,
    decay: float,
    momentum: float,
    epsilon: float,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = ...,
    copies: Sequence[_Tensors] = ...,
    others: Sequence[_Tensors] = ...,
    counts: Sequence[float] | None = ...,
    threads: int = 1,
) -> None: ...
def adam(
    weights: _Tensors,
    gradients: _Tensors,
    firsts: _Tensors,
    seconds: _Tensors,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    scale: float,
    weight_decay: Sequence[float],
    clip: float = ...,
    copies: Sequence[_Tensors] = ...,
    others: Sequence[_Tensors] = ...,
    counts: Sequence[float] | None = ...,
    threads: int = 1,
) -> None: ...
