"""layer.pyx on a GPU: ReLU, dropout and its random numbers, softmax, and rows that are added.

Results are written into arrays of the caller. All but softmax have the CPU's bits (but for
subnormal numbers, which CuPy's compiler takes for 0); softmax adds up in an order of its own, which
depends on the shape alone. Narrow arrays, float16 or bfloat16, are computed with in float32, and
each result is rounded once.

A TypeError or ValueError names the array of a wrong dtype, size or layout. What lies in an array is
not looked at: a GPU cannot raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from minidist.kernels.grid import (
    THREADS,
    WARPS,
    Array,
    Machine,
    blocks,
    check,
    elements,
    launch,
    pointers,
    struct,
    wide,
)
from minidist.kernels.source import Module

Words = Sequence[int]

_INT64 = np.dtype(np.int64)


def relu(machine: Machine, x: Array, y: Array) -> None:
    """Store x where it is not negative, else 0, in y, which may be x. NaN stays NaN."""
    elements(machine, _module(x), "relu", {"x": x, "y": y})


def relu_backward(machine: Machine, dy: Array, y: Array, dx: Array) -> None:
    """Store dy where y > 0, else 0, in dx, which may be dy or y."""
    elements(machine, _module(dy), "relu_backward", {"dy": dy, "y": y, "dx": dx})


def relu6(machine: Machine, x: Array, y: Array) -> None:
    """Store 0 where x is negative, 6 where it is above, else x, in y, which may be x."""
    elements(machine, _module(x), "relu6", {"x": x, "y": y})


def relu6_backward(machine: Machine, dy: Array, y: Array, dx: Array) -> None:
    """Store dy where 0 < y < 6, else 0, in dx, which may be dy or y."""
    elements(machine, _module(dy), "relu6_backward", {"dy": dy, "y": y, "dx": dx})


def uniform(machine: Machine, out: Array, key: Words, counter: Words) -> None:
    """Fill float32 or float64 with uniform numbers in [0, 1), a pure function of key and counter.

    See minidist.kernels.layer.uniform.
    """
    stream = _stream("uniform", key, counter, out.nbytes // 4)
    elements(machine, Module("random", out.dtype.name), "uniform", {"out": out}, stream)


def dropout(machine: Machine, x: Array, y: Array, rate: float, key: Words, counter: Words) -> None:
    """Store x / (1 - rate), or 0 with probability `rate`, in y, which may be x.

    See minidist.kernels.layer.dropout. A ValueError unless 0 <= rate < 1.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be at least 0 and below 1, got {rate}")
    stream = _stream("dropout", key, counter, x.size)
    dropped, scale = np.int32(ceil(rate * 16777216)), wide(x.dtype.name).type(1 / (1 - rate))
    elements(machine, _module(x), "dropout", {"x": x, "y": y}, stream, dropped, scale)


def softmax(machine: Machine, x: Array, y: Array) -> None:
    """Store e^x / sum e^x along the last axis in y, which may be x."""
    _rows(machine, "softmax", x, y)


def log_softmax(machine: Machine, x: Array, y: Array) -> None:
    """Store x - log sum e^x along the last axis in y, which may be x."""
    _rows(machine, "log_softmax", x, y)


def softmax_cross_entropy(
    machine: Machine, logits: Array, labels: Array, losses: Array, dlogits: Array
) -> None:
    """Store the loss of each example, and its derivative softmax(logits) - onehot(label).

    logits and dlogits [n, classes] (they may be the same array), labels [n] int64, losses [n]. A
    label that is none of the classes makes its loss NaN.
    """
    verb = "softmax_cross_entropy"
    n, classes = logits.shape
    dtype = logits.dtype
    for name, array, kind, size in (
        ("logits", logits, dtype, n * classes),
        ("labels", labels, _INT64, n),
        ("losses", losses, dtype, n),
        ("dlogits", dlogits, dtype, n * classes),
    ):
        check(verb, name, array, kind, size)
    if n and not classes:
        raise ValueError(f"{verb}: {n} examples, but no classes")
    arguments = (np.int64(n), np.int64(classes))
    arrays = pointers(machine, logits, labels, losses, dlogits)
    launch(machine, _module(logits), verb, blocks(n, WARPS), *arguments, *arrays)


def scatter_add(machine: Machine, a: Array, ascending: Array, order: Array, rows: Array) -> None:
    """Do a[indices[i]] += rows[i] in place, in the order of i, for rows of any shape.

    order [k] int64 is what a stable argsort says of the indices, ascending [k] int64 are these in
    that order.
    """
    count, width, dtype = rows.shape[0], prod(rows.shape[1:]), a.dtype
    check("scatter_add", "a", a, dtype, a.shape[0] * width)
    check("scatter_add", "ascending", ascending, _INT64, count)
    check("scatter_add", "order", order, _INT64, count)
    check("scatter_add", "rows", rows, dtype, count * width)
    grid = blocks(count * width, THREADS)
    arrays = pointers(machine, ascending, order, rows, a)
    sizes = np.int64(count), np.int64(width)
    launch(machine, _module(a), "scatter_add", grid, *sizes, *arrays)


def _stream(verb: str, key: Words, counter: Words, words: int) -> Any:
    """Return the C struct of a stream of random words."""
    for name, given, count in (("key", key, 2), ("counter", counter, 3)):
        if len(given) != count or not all(0 <= word < 1 << 32 for word in given):
            raise ValueError(
                f"{verb}: {name} must be {count} words of 32 bits, 0 to 2**32 - 1, got {given}"
            )
    if words > 1 << 34:
        raise ValueError(f"{verb}: a counter has 2**34 words, not {words}; use several counters")
    return struct("u4", *key, *counter)


def _module(array: Array) -> Module:
    return Module("layer", array.dtype.name)


def _rows(machine: Machine, verb: str, x: Array, y: Array) -> None:
    """Launch what a warp does row by row, of x [..., classes]."""
    dtype, classes = x.dtype, x.shape[-1]
    check(verb, "x", x, dtype, x.size)
    check(verb, "y", y, dtype, x.size)
    rows = x.size // classes if classes else 0
    arguments = (np.int64(rows), np.int64(classes), *pointers(machine, x, y))
    launch(machine, _module(x), verb, blocks(rows, WARPS), *arguments)
