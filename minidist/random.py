"""Random numbers that depend on where they are drawn, and on nothing else.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011): a function of a key and a counter, without state. `context.draw` makes both from the seed,
the step, the replica and the layer, so what is drawn does not depend on the order in which
threads run, on the policy, or on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from minidist import context
from minidist.device.ops import Words
from minidist.dtypes import HostArray, as_array
from minidist.kernels import layer as kernel

seed = context.seed


class Stream:
    """The numbers of one draw, in the host's memory; each array asked for continues the stream.

    All is computed in float64 and rounded once to the dtype asked for.
    """

    __slots__ = ("_arrays", "_counter", "_key")

    def __init__(self, key: Words, counter: Words) -> None:
        self._key = key
        self._counter = counter
        self._arrays = 0

    def uniform(
        self, shape: Sequence[int], dtype: Any = np.float32, low: float = 0.0, high: float = 1.0
    ) -> HostArray:
        """Evenly distributed between `low` and `high`."""
        values = low + (high - low) * self._unit(prod(shape))
        return as_array(values.reshape(shape), dtype)

    def normal(
        self, shape: Sequence[int], dtype: Any = np.float32, mean: float = 0.0, stddev: float = 1.0
    ) -> HostArray:
        """Normally distributed."""
        return as_array((mean + stddev * self._normal(prod(shape))).reshape(shape), dtype)

    def truncated_normal(
        self, shape: Sequence[int], dtype: Any = np.float32, mean: float = 0.0, stddev: float = 1.0
    ) -> HostArray:
        """Normally distributed, but what is further than 2σ from the mean is drawn again.

        The standard deviation of the result is 0.8796·`stddev`, as TensorFlow's.
        """
        values = self._normal(prod(shape))
        far = np.flatnonzero(np.abs(values) > 2)
        while len(far):
            values[far] = self._normal(len(far))
            far = far[np.abs(values[far]) > 2]
        return as_array((mean + stddev * values).reshape(shape), dtype)

    def _unit(self, count: int) -> HostArray:
        """Return `count` float64 in [0, 1).

        The counter says which draw this is and numbers the blocks in it, so further arrays change
        the key: n is added to its second word, which is 0 for seeds below 2³².
        """
        values = np.empty(count, np.float64)
        key = (self._key[0], (self._key[1] + self._arrays) % 2**32)
        kernel.uniform(values, key, self._counter)
        self._arrays += 1
        return values

    def _normal(self, count: int) -> HostArray:
        """Box and Muller (1958): two uniforms give two normals, √(−2 ln u)·(cos 2πv, sin 2πv)."""
        pairs = (count + 1) // 2
        u, v = self._unit(2 * pairs).reshape(2, pairs)
        radius = np.sqrt(-2 * np.log1p(-u))  # 1 − u is never 0
        angle = 2 * np.pi * v
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def stream(layer: int) -> Stream:
    """Return the next draw of a layer in this thread's context."""
    return Stream(*context.draw(layer))
