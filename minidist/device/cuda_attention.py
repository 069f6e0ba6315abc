"""Causal attention on a GPU: matrix products of all heads at once, and a softmax between them.

Here the scores of all heads are written out, tokens x tokens numbers each, and dropped when a verb
is done; the way back computes them again.
"""

from __future__ import annotations

import cupy

from minidist.device.base import Array
from minidist.device.cuda_blas import multiply
from minidist.device.cuda_machine import CudaMachine
from minidist.kernels import gpu_attention


def attend(machine: CudaMachine, qkv: Array, heads: int) -> Array:
    """Return y [n, t, heads·size] of qkv [n, t, 3·heads·size], float32 or float64."""
    q, k, v = _by_head(qkv, 3, heads)
    y = cupy.ndarray(q.shape, qkv.dtype)
    multiply(machine.blas, _probabilities(machine, q, k), v, y)
    return _by_token(y, 1, heads)


def attend_backward(machine: CudaMachine, dy: Array, qkv: Array, heads: int) -> Array:
    """Return the gradient of qkv, given that of y."""
    q, k, v = _by_head(qkv, 3, heads)
    (dy,) = _by_head(dy, 1, heads)
    p = _probabilities(machine, q, k)
    dp = ds = cupy.ndarray(p.shape, qkv.dtype)  # one is made where the other was
    multiply(machine.blas, dy, v, dp, transpose_b=True)
    gpu_attention.causal_softmax_backward(machine, p, ds, q.shape[2] ** -0.5)
    dqkv = cupy.ndarray((3, *q.shape), qkv.dtype)
    multiply(machine.blas, ds, k, dqkv[0])
    multiply(machine.blas, ds, q, dqkv[1], transpose_a=True)
    multiply(machine.blas, p, dy, dqkv[2], transpose_a=True)
    return _by_token(dqkv, 3, heads)


def _probabilities(machine: CudaMachine, q: Array, k: Array) -> Array:
    heads, tokens, size = q.shape
    scores = cupy.ndarray((heads, tokens, tokens), q.dtype)
    multiply(machine.blas, q, k, scores, transpose_b=True)
    gpu_attention.causal_softmax(machine, scores, size**-0.5)
    return scores


def _by_head(x: Array, parts: int, heads: int) -> Array:
    """Return [parts, n·heads, t, size] of x [n, t, parts·heads·size]."""
    n, tokens, width = x.shape
    size = width // (parts * heads)
    apart = x.reshape(n, tokens, parts, heads, size).transpose((2, 0, 3, 1, 4))
    return cupy.ascontiguousarray(apart).reshape(parts, n * heads, tokens, size)


def _by_token(x: Array, parts: int, heads: int) -> Array:
    """Return [n, t, parts·heads·size] of x [parts, n·heads, t, size]."""
    *_, every, tokens, size = x.shape
    n = every // heads
    apart = x.reshape(parts, n, heads, tokens, size).transpose((1, 3, 0, 2, 4))
    return cupy.ascontiguousarray(apart).reshape(n, tokens, parts * heads * size)
