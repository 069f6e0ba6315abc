"""The formulas of the headers in NumPy, a line or so each: what the compiled kernels must equal.

Nothing is changed in place; each function returns what the kernel of its name would store. Python
numbers do not raise the dtype of an array, so hyperparameters are rounded once to its element
type, as in the kernels. Sums over replicas and windows run in the kernels' order: the update rules,
sums, random numbers and windows give the same bits; softmax, with NumPy's exp, nearly the same.
"""

from __future__ import annotations

import colorsys
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


def relu6(x: Array) -> Array:
    return np.where(x > 6, x.dtype.type(6), relu(x))


def relu6_backward(dy: Array, y: Array) -> Array:
    return np.where(y < 6, relu_backward(dy, y), dy.dtype.type(0))


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


def layer_norm(x: Array, scale: Array, offset: Array, epsilon: float) -> Array:
    normal: Array = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(
        x.var(axis=-1, keepdims=True) + epsilon
    )
    return normal * scale + offset


def layer_norm_backward(
    dy: Array, x: Array, scale: Array, epsilon: float
) -> tuple[Array, Array, Array]:
    """Gradients of x, scale and offset."""
    inverse = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + epsilon)
    normal = (x - x.mean(axis=-1, keepdims=True)) * inverse
    g, rows = dy * scale, tuple(range(x.ndim - 1))
    along = normal * (g * normal).mean(axis=-1, keepdims=True)
    dx: Array = (g - g.mean(axis=-1, keepdims=True) - along) * inverse
    return dx, (dy * normal).sum(axis=rows), dy.sum(axis=rows)


def gelu(x: Array) -> Array:
    tanh: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * (1 + tanh) / 2


def gelu_backward(dy: Array, x: Array) -> Array:
    tanh: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return dy * (1 + tanh + x * (1 - tanh**2) * inner) / 2


def causal_attention(qkv: Array, heads: int) -> Array:
    """[n, t, 3 * heads * size] -> [n, t, heads * size]; in float64 close to the kernel's bits."""
    q, k, v = by_head(qkv, 3, heads)
    return by_token([causal_softmax(q @ k.mT / math.sqrt(q.shape[-1])) @ v])


def causal_attention_backward(dy: Array, qkv: Array, heads: int) -> Array:
    q, k, v = by_head(qkv, 3, heads)
    (dy,) = by_head(dy, 1, heads)
    scale = 1 / math.sqrt(q.shape[-1])
    p, dp = causal_softmax(q @ k.mT * scale), dy @ v.mT
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    return by_token([ds @ k, ds.mT @ q, p.mT @ dy])


def causal_softmax(scores: Array) -> Array:
    """The probabilities of tokens 0 to i in row i."""
    seen = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    exps = np.exp(seen - seen.max(axis=-1, keepdims=True, initial=-np.inf))
    probabilities: Array = exps / exps.sum(axis=-1, keepdims=True)
    return probabilities


def by_head(x: Array, parts: int, heads: int) -> Array:
    """[n, t, parts * heads * size] -> [parts, n, heads, t, size]"""
    n, tokens, width = x.shape
    apart = x.reshape(n, tokens, parts, heads, width // (parts * heads))
    return apart.transpose(2, 0, 3, 1, 4)


def by_token(parts: Sequence[Array]) -> Array:
    """Parts [n, heads, t, size] -> [n, t, parts * heads * size]"""
    apart: Array = np.stack(parts).transpose(1, 3, 0, 2, 4)
    return apart.reshape(*apart.shape[:2], math.prod(apart.shape[2:]))


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


def depthwise(x: Array, w: Array, windows: Windows) -> Array:
    """Sum the taps of w [kh, kw, c] in order, each times what lies under it."""
    y = np.zeros((x.shape[0], *windows.output, x.shape[3]), x.dtype)
    for place, seen in zip(windows.places(), windows.take(x, 0), strict=True):
        y += seen * w[place]
    return y


def depthwise_backward_input(
    dy: Array, w: Array, shape: tuple[int, ...], windows: Windows
) -> Array:
    return windows.add_back(np.stack([dy * w[place] for place in windows.places()]), shape)


def depthwise_backward_filter(x: Array, dy: Array, windows: Windows) -> Array:
    """In float64; the kernel's own order is another one, so the last bits may differ."""
    parts: Array = np.einsum("pnijc,nijc->pc", windows.take(x, 0).astype("f8"), dy.astype("f8"))
    return parts.reshape(*windows.size, x.shape[3])


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


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def crop(
    images: NDArray[np.uint8],
    numbers: NDArray[np.int64],
    pad: int,
    key: Sequence[int],
    counter: Sequence[int],
) -> NDArray[np.uint8]:
    _, h, w, _ = images.shape
    words = philox(key, (0, numbers.astype(np.uint64), *counter))
    tops, lefts = words[:2] * np.uint64(2 * pad + 1) >> np.uint64(32)
    padded = np.pad(images[numbers], [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    places = zip(padded, tops, lefts, words[2] >> np.uint64(31), strict=True)
    return np.stack([x[t : t + h, a : a + w][:, :: -1 if m else 1] for x, t, a, m in places])


def resize_matrix(method: str, size: int, whole: int, begin: int, out: int) -> NDArray[np.float64]:
    """What each of `out` results from number `begin` on takes of each of `size`: [out, size]."""
    step = np.float32(size) / np.float32(whole)
    x = (np.arange(begin, begin + out, dtype=np.float32) * step)[:, None].astype(np.float64)
    low = np.minimum(np.floor(x), size - 1)
    if method == "area":
        ends = (np.arange(begin + 1, begin + out + 1, dtype=np.float32) * step)[:, None]
        at = np.arange(size)
        shares: NDArray[np.float64] = np.minimum(ends, at + 1) - np.maximum(x, at)
        return np.maximum(shares, 0) / np.float64(step)
    near = np.arange(*{"nearest": (0, 1), "bilinear": (0, 2), "bicubic": (-1, 3)}[method])
    t, a = abs(x - low - near), -0.75
    weights = {
        "nearest": np.ones_like(t),
        "bilinear": 1 - t,
        "bicubic": np.where(
            t < 1,
            (a + 2) * t**3 - (a + 3) * t**2 + 1,
            np.where(t < 2, a * (t**3 - 5 * t**2 + 8 * t - 4), 0),
        ),
    }[method]
    matrix = np.zeros((out, size))
    np.add.at(
        matrix,
        (np.arange(out)[:, None], np.clip(low + near, 0, size - 1).astype(int)),
        weights,
    )
    return matrix


def turn_colour(rgb: Sequence[float], saturation: float, turns: float) -> tuple[float, ...]:
    hue, old, value = colorsys.rgb_to_hsv(*rgb)
    return colorsys.hsv_to_rgb((hue + turns) % 1, min(old * saturation, 1), value)
