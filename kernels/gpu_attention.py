"""What attention does on a GPU between its matrix products: softmax over what a token sees.

Scores, [heads, tokens, tokens] of float32 or float64, are changed in place. Sums are added up in an
order of their own, which depends on the shape alone. A TypeError or ValueError names the array of a
wrong dtype, size or layout.
"""

from __future__ import annotations

import numpy as np

from minidist.kernels.grid import WARPS, Array, Machine, blocks, check, launch, pointers
from minidist.kernels.source import Module


def causal_softmax(machine: Machine, scores: Array, scale: float) -> None:
    """Make scores, times `scale`, probabilities of tokens 0 to i in row i, and 0 behind them."""
    _rows(machine, "causal_softmax", scale, {"scores": scores})


def causal_softmax_backward(machine: Machine, p: Array, gradients: Array, scale: float) -> None:
    """Make gradients of the probabilities p those of the scores."""
    _rows(machine, "causal_softmax_backward", scale, {"p": p, "gradients": gradients})


def _rows(machine: Machine, verb: str, scale: float, arrays: dict[str, Array]) -> None:
    first = next(iter(arrays.values()))
    heads, tokens, _ = first.shape
    for name, array in arrays.items():
        check(verb, name, array, first.dtype, heads * tokens * tokens)
    rows = heads * tokens
    arguments = (np.int64(rows), np.int64(tokens), first.dtype.type(scale))
    given = (*arguments, *pointers(machine, *arrays.values()))
    launch(machine, Module("attention", first.dtype.name), verb, blocks(rows, WARPS), *given)
