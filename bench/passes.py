"""Passes over activations beside a copy of them: bias, ReLU, batch normalisation, pooling.

    python bench/passes.py

Figures are GB/s, of the bytes that a pass has to read and write, from the best of some turns of one
thread's own time; `copy` is NumPy's, of the same array. What is as fast as the copy cannot gain but
by reading less. Arrays lie where they lie in training: those of a few megabytes in the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from minidist.kernels import channel, layer

SHAPES = [  # of resnet20 at batch 32, lenet at 64, and resnet50 at 4
    (32, 32, 32, 16),
    (32, 16, 16, 32),
    (32, 8, 8, 64),
    (64, 28, 28, 32),
    (4, 112, 112, 64),
    (4, 56, 56, 256),
    (4, 28, 28, 512),
    (4, 14, 14, 1024),
    (4, 7, 7, 2048),
]
TURNS = 15
EPSILON = 1e-5


def passes(shape: tuple[int, ...]) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return, by name, how many times the array's bytes a pass moves, and the pass."""
    rng = np.random.default_rng(0)
    x, dy, add = (rng.standard_normal(shape, np.float32) for _ in range(3))
    y, dx, dz = (np.zeros_like(x) for _ in range(3))
    mean, variance, scale, offset, dscale, doffset = np.ones((6, shape[-1]), np.float32)
    n, h, w, c = shape
    pooled = np.zeros((n, h // 2, w // 2, c), np.float32)
    winners = np.zeros(pooled.shape, np.int32)
    halves = (2, 2, 2, 2, 0, 0)
    moments = (mean, variance, scale)
    forward = (x, *moments, offset, EPSILON, y)
    backward = (dy, x, *moments, EPSILON, True, dx, dscale, doffset, y)
    return {
        "copy": (2, lambda: np.copyto(y, x)),
        "moments": (1, lambda: channel.moments(x, mean, variance)),
        "normalize": (2, lambda: channel.normalize(*forward, relu=True)),
        "with add": (3, lambda: channel.normalize(*forward, add, relu=True)),
        "backward": (7, lambda: channel.normalize_backward(*backward, dx)),
        "with add ": (7, lambda: channel.normalize_backward(*backward, dz)),
        "bias": (2, lambda: channel.bias(x, offset, y, relu=True)),
        "bias back": (3, lambda: channel.bias_backward(dy, dscale, y, dz)),
        "pool": (1.5, lambda: layer.max_pool(x, pooled, winners, *halves)),
        "pool back": (1.5, lambda: layer.max_pool_backward(pooled, winners, dx, *halves)),
    }


def best(work: Callable[[], object]) -> float:
    """Return the least seconds of this thread that some work took."""
    work()
    seconds = []
    for _ in range(TURNS):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def main() -> None:
    names = list(passes((1, 2, 2, 1)))
    print(f"{'':18}" + "".join(f"{name:>12}" for name in names))
    for shape in SHAPES:
        size = 4 * float(np.prod(shape)) / 1e9
        figures = [size * times / best(work) for times, work in passes(shape).values()]
        text = "×".join(map(str, shape))
        print(f"{text:18}" + "".join(f"{figure:12.1f}" for figure in figures))


if __name__ == "__main__":
    main()
