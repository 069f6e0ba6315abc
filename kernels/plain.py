"""The formulas of the headers in NumPy, a line or so each: what the compiled kernels must equal.

Nothing is changed in place; each function returns what the kernel of its name would store. Python
numbers do not raise the dtype of an array, so hyperparameters are rounded once to its element
type, as in the kernels. Sums over replicas and windows run in the kernels' order: the update rules,
sums, random numbers and windows give the same bits; softmax, with NumPy's exp, nearly the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Words = NDArray[np.uint64]


def gradient(
    g: Array, w: Array, scale: float, weight_decay: float, clip: float = math.inf
) -> Array:
    """Scale, clip, then add weight decay; without decay no term at all, so that -0 stays -0."""
    g = np.clip(g * scale, g.dtype.type(-clip), g.dtype.type(clip))
    return g + weight_decay * w if weight_decay else g


def sgd(w: Array, g: Array, *, lr: float) -> Array:
    return w - lr * g


def momentum(
    w: Array, g: Array, m: Array, *, lr: float, momentum: float, nesterov: bool
) -> tuple[Array, Array]:
    m = momentum * m + g
    return w - lr * (g + momentum * m if nesterov else m), m


def rmsprop(
    w: Array,
    g: Array,
    s: Array,
    m: Array,
    *,
    lr: float,
    decay: float,
    momentum: float,
    epsilon: float,
) -> tuple[Array, Array, Array]:
    s = decay * s + (1 - decay) * (g * g)
    m = momentum * m + lr * g / np.sqrt(s + epsilon)
    return w - m, s, m


def adam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
) -> tuple[Array, Array, Array]:
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    bias1, bias2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    return w - lr * bias2 / bias1 * m / (np.sqrt(v) + epsilon * bias2), m, v


def sum(sources: Sequence[Array], weights: Sequence[float], scale: float) -> Array:
    """Add the replicas' weighted arrays in replica order, then scale."""
    total = weights[0] * sources[0]
    for weight, source in zip(weights[1:], sources[1:], strict=True):
        total = total + weight * source
    return total * scale


def first_nonfinite(tensors: Sequence[Array]) -> int:
    return next((i for i, x in enumerate(tensors) if not np.isfinite(x).all()), -1)


def sum_squares(tensors: Sequence[Array]) -> float:
    """In float64; the kernel's own order is another one, so the last bits may differ."""
    return math.fsum(float(np.sum(np.square(x, dtype=np.float64))) for x in tensors)


def narrow(x: NDArray[np.float32], dtype: Any) -> NDArray[Any]:
    """Round to float16 or bfloat16, once; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def narrow_sum(
    sources: Sequence[NDArray[Any]], weights: Sequence[float], scale: float, dtype: Any
) -> NDArray[Any]:
    """Add up in float32 what is narrow; `dtype` is that of the result."""
    return narrow(sum([x.astype(np.float32) for x in sources], weights, scale), dtype)


def relu(x: Array) -> Array:
    return np.where(x < 0, x.dtype.type(0), x)


def relu_backward(dy: Array, y: Array) -> Array:
    return np.where(y > 0, dy, dy.dtype.type(0))


def philox(key: Sequence[int], counter: Sequence[int | Words]) -> Words:
    """Philox4x32-10 on words of 32 bits held in uint64: [4, ...] for the shape of the counter."""
    k0, k1 = key
    c = [np.asarray(word, np.uint64) for word in counter]
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c0, c2 = (p1 >> half) ^ c[1] ^ np.uint64(k0), (p0 >> half) ^ c[3] ^ np.uint64(k1)
        c = [c0, p1 & low, c2, p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack(np.broadcast_arrays(*c))


def words(n: int, key: Sequence[int], counter: Sequence[int]) -> Words:
    """The first n words of a stream: those of block 0, then of block 1, ..."""
    blocks = np.arange((n + 3) // 4, dtype=np.uint64)
    return philox(key, (blocks, *counter)).T.reshape(-1)[:n]


def uniform(n: int, dtype: Any, key: Sequence[int], counter: Sequence[int]) -> Array:
    if np.dtype(dtype) == np.float32:
        return (words(n, key, counter) >> 8).astype(np.float32) * np.float32(2**-24)
    high, low = words(2 * n, key, counter).reshape(-1, 2).T
    return ((high >> 5).astype(np.float64) * 2**26 + (low >> 6)) * 2**-53


def dropout(x: Array, rate: float, key: Sequence[int], counter: Sequence[int]) -> Array:
    kept = (words(x.size, key, counter) >> 8) * 2**-24 >= rate
    return np.where(kept.reshape(x.shape), x * x.dtype.type(1 / (1 - rate)), x.dtype.type(0))


def softmax_cross_entropy(logits: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    rows = np.arange(len(logits))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    total = exps.sum(axis=1, keepdims=True)
    dlogits = exps / total
    dlogits[rows, labels] -= 1
    return np.log(total[:, 0]) - shifted[rows, labels], dlogits


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    total: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return total


def scatter_add(a: Array, indices: NDArray[np.int64], rows: Array) -> Array:
    """Add row i of rows to row indices[i] of a, in the order of i."""
    total = a.copy()
    np.add.at(total, indices, rows)
    return total


def moments(x: Array) -> tuple[Array, Array]:
    """Mean and biased variance of each column."""
    return x.mean(axis=0), x.var(axis=0)


def normalize(
    x: Array, mean: Array, variance: Array, scale: Array, offset: Array, epsilon: float
) -> Array:
    normal: Array = (x - mean) / np.sqrt(variance + epsilon)
    return normal * scale + offset


def normalize_backward(
    dy: Array,
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array,
    epsilon: float,
    moments: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of x, scale and offset; with `moments`, mean and variance are those of x."""
    inverse = 1 / np.sqrt(variance + epsilon)
    normal = (x - mean) * inverse
    of_mean = dy.mean(axis=0) + normal * (dy * normal).mean(axis=0) if moments else 0
    return (dy - of_mean) * scale * inverse, (dy * normal).sum(axis=0), dy.sum(axis=0)


@dataclass(frozen=True)
class Windows:
    """Where windows lie on images: how many, how large, how far apart, how much padding before."""

    output: tuple[int, int]  # each pair is (vertical, horizontal)
    size: tuple[int, int]
    strides: tuple[int, int]
    before: tuple[int, int]

    def pad(self, x: Array, value: float) -> Array:
        """Surround [n, h, w, c] by all that a window covers."""
        sides = [(0, 0), (0, 0), (0, 0), (0, 0)]
        for axis in (0, 1):
            covered = (self.output[axis] - 1) * self.strides[axis] + self.size[axis]
            after = max(0, covered - self.before[axis] - x.shape[axis + 1])
            sides[axis + 1] = (self.before[axis], after)
        return np.pad(x, sides, constant_values=value)

    def at(self, padded: Array, p: int, q: int) -> Array:
        """View [n, rows, columns, c] of what lies at place (p, q) of each window."""
        (rows, columns), (down, right) = self.output, self.strides
        return padded[:, p::down, q::right][:, :rows, :columns]

    def places(self) -> list[tuple[int, int]]:
        return [(p, q) for p in range(self.size[0]) for q in range(self.size[1])]

    def take(self, x: Array, value: float) -> Array:
        """[kh * kw, n, rows, columns, c]: what each window sees, `value` for padding."""
        padded = self.pad(x, value)
        return np.stack([self.at(padded, p, q) for p, q in self.places()])

    def add_back(self, parts: Array, shape: tuple[int, ...]) -> Array:
        """Sum parts [kh * kw, n, rows, columns, c] into images of this shape."""
        padded = self.pad(np.zeros(shape, parts.dtype), 0)
        # The kernels add row by row of the window, and in it from the leftmost window on: what
        # the leftmost window has over an element is the rightmost of its places.
        for place, (p, q) in sorted(enumerate(self.places()), key=lambda e: (e[1][0], -e[1][1])):
            self.at(padded, p, q)[...] += parts[place]
        (top, left), (h, w) = self.before, shape[1:3]
        return padded[:, top : top + h, left : left + w]


def im2col(x: Array, windows: Windows) -> Array:
    seen = windows.take(x, 0)
    return np.moveaxis(seen, 0, 3).reshape(*seen.shape[1:4], len(seen) * x.shape[3])


def col2im(columns: Array, shape: tuple[int, ...], windows: Windows) -> Array:
    parts = columns.reshape(*columns.shape[:3], len(windows.places()), shape[3])
    return windows.add_back(np.moveaxis(parts, 3, 0), shape)


def filter_gradient(x: Array, dy: Array, windows: Windows) -> Array:
    parts: Array = np.einsum("pnijc,nijk->pck", windows.take(x, 0), dy)
    return parts.reshape(*windows.size, x.shape[3], dy.shape[3])


def max_pool(x: Array, windows: Windows) -> tuple[Array, NDArray[np.int32]]:
    seen, real = windows.take(x, -np.inf), windows.take(np.ones_like(x), 0)
    largest = seen.max(axis=0)
    # NumPy's argmax, too, takes the first of equals and prefers NaN. Padding equals -inf only.
    argmax = np.where(largest == -np.inf, real.argmax(axis=0), seen.argmax(axis=0))
    return largest, argmax.astype(np.int32)


def max_pool_backward(
    dy: Array, argmax: NDArray[np.int32], shape: tuple[int, ...], windows: Windows
) -> Array:
    won = np.arange(len(windows.places())).reshape(-1, 1, 1, 1, 1) == argmax
    return windows.add_back(np.where(won, dy, dy.dtype.type(0)), shape)


def average_pool(x: Array, windows: Windows) -> Array:
    total = np.zeros((x.shape[0], *windows.output, x.shape[3]), x.dtype)
    for seen in windows.take(x, 0):
        total += seen
    total /= windows.take(np.ones_like(x), 0).sum(axis=0)
    return total


def average_pool_backward(dy: Array, shape: tuple[int, ...], windows: Windows) -> Array:
    real = windows.take(np.ones(shape, dy.dtype), 0)
    return windows.add_back(real * (dy / real.sum(axis=0)), shape)
