"""What policies are tested with: shapes, counts, gradients, and the oracle's model in minidist."""

from __future__ import annotations

import numpy as np
from oracle import TwoLayers, split

import minidist as md

DEVICES = [1, 2, 3, 5]
DTYPES = ["float32", "float64"]
SHAPES = [(), (1,), (3,), (2, 5), (7, 11), (3, 1, 4, 2)]
BOUND = {"float32": 1e-5, "float64": 1e-12}  # relative norm, across orders of summation


def arrays(rng, shapes, dtype):
    return [np.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def schedule(n):
    """Return the counts of some steps: none given, equal, uneven, some empty, all empty."""
    return [
        None,
        split(4 * n, n),
        split(4 * n - 1, n),
        split(max(1, n - 1), n),
        [5, *[0] * (n - 1)],
        [0] * n,
        [*[0] * (n - 1), 3],
        [7 * (replica + 1) % 5 + 1 for replica in range(n)],
    ]


def given_gradients(rng, shapes, dtype, counts, n):
    """Return random gradients; zeros where the count is 0, as a mean over no examples has."""
    gradients = [arrays(rng, shapes, dtype) for _ in range(n)]
    for replica, count in enumerate(counts or []):
        if count == 0:
            gradients[replica] = [np.zeros_like(gradient) for gradient in gradients[replica]]
    return gradients


def global_batch(rng, examples, dtype):
    """Return random features and labels for the oracle's TwoLayers."""
    x = rng.normal(size=(examples, TwoLayers.features)).astype(dtype)
    return x, rng.integers(TwoLayers.classes, size=examples)


def parts(x, labels, counts):
    """Return each replica's slice of a global batch."""
    ends = np.cumsum(counts)
    return [
        (x[end - count : end], labels[end - count : end])
        for end, count in zip(ends, counts, strict=True)
    ]


def two_layers(variables, x, labels):
    """Return the mean loss of the oracle's TwoLayers, computed by minidist."""
    a, b, c, d, gain = variables
    h = md.ops.square(md.ops.matmul(md.constant(x), a) + b)
    logits = gain * (md.ops.matmul(h, c) + d)
    return md.ops.reduce_mean(md.ops.softmax_cross_entropy(logits, md.constant(labels)))
