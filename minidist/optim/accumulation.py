"""Accumulation: one replica's gradients of several batches become those of one larger batch.

    g = Σ(c_j · g_j) · (1/Σ c_j)        c_j: how many examples are behind the gradients of batch j

Without counts all batches weigh alike. The replica then brings g with the count Σ c_j.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.device import Array, Device
from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.tape import Gradient


class Accumulator:
    """Adds up the gradients that one replica computes on its device, over `steps` calls."""

    def __init__(self, device: Device, steps: int) -> None:
        self._device = device
        self._steps = steps
        self._sums: dict[int, Array] = {}  # by number of variable
        self._counts: list[int | None] = []

    @property
    def begun(self) -> int:
        """How many calls' gradients wait for more."""
        return len(self._counts)

    def add(
        self, gradients: Sequence[Gradient | None], count: int | None
    ) -> tuple[list[Gradient | None], int | None] | None:
        """Add one batch's gradients, which are only read; in the last call return the mean.

        A batch without examples has no say. A gradient of None adds nothing. Raises UsageError
        where some batches have a count and some have none.
        """
        if self._counts and (self._counts[0] is None) != (count is None):
            raise UsageError(
                f"accumulation: some batches came with a count and some without: {self._counts} "
                f"and now {count}; pass it in all or in none"
            )
        self._counts.append(count)
        if count != 0:
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    self._add(i, gradient, 1.0 if count is None else float(count))
        if len(self._counts) < self._steps:
            return None
        total = None if count is None else sum(known for known in self._counts if known)
        scale = 1.0 / (self._steps if total is None else max(1, total))
        means = list(self._sums.values())
        if means:
            self._device.ops.sum([means], [means], scale=scale)
        whole = [self._sums.get(i) for i in range(len(gradients))]
        if total == 0:  # these have no say, but tell which variables are used
            whole = list(gradients)
        self._sums, self._counts = {}, []
        return whole, total

    def _add(self, i: int, gradient: Gradient, weight: float) -> None:
        device = self._device
        if isinstance(gradient, IndexedSlices):
            gradient = gradient.to_dense().array
        total = self._sums.get(i)
        if total is None:
            total = self._sums[i] = device.allocate(gradient.shape, gradient.dtype)
            device.ops.sum([[total]], [[gradient]], weights=[weight])
        else:
            device.ops.sum([[total]], [[total], [gradient]], weights=[1.0, weight])
