"""Accumulation: one replica's gradients of several batches become those of one larger batch.

    g = Σ(c_j · g_j) · (1/Σ c_j)        c_j: how many examples are behind the gradients of batch j

Without counts all batches weigh alike. The replica then brings g with the count Σ c_j. A run that
fails ends the window: some replicas have brought a batch in it that others have not, so what was
added up is dropped in all of them.
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
        self._failed_runs = 0  # of the strategy, when the window began

    @property
    def begun(self) -> int:
        """How many calls' gradients wait for more."""
        return len(self._counts)

    def add(
        self, gradients: Sequence[Gradient | None], count: int | None, failed_runs: int
    ) -> tuple[list[Gradient | None], int | None] | None:
        """Add one batch's gradients, which are only read; in the last call return the mean.

        failed_runs: how many runs of the strategy have failed so far.
        A batch without examples has no say. A gradient of None adds nothing. Raises UsageError
        where some batches have a count and some have none.
        """
        if failed_runs != self._failed_runs:
            self._sums, self._counts, self._failed_runs = {}, [], failed_runs
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
        for dtype in {each.dtype for each in self._sums.values()}:
            means = [each for each in self._sums.values() if each.dtype == dtype]
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
