"""Arrays of GPUs in sums that the host takes: it sums copies of them, and sends back the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from minidist.device.base import Array, Device, home
from minidist.device.ops import Tensors

Rows = Sequence[Tensors]


def brought(destinations: Rows, sources: Rows) -> AbstractContextManager[tuple[Rows, Rows]]:
    """Return rows in the host's memory in place of these, for the length of a with statement.

    A row is taken to be in the host's memory where its first and last arrays are.
    """
    for row in (*destinations, *sources):
        if row and not (type(row[0]) is np.ndarray is type(row[-1])):
            return _brought(destinations, sources)
    return nullcontext((destinations, sources))


@contextmanager
def _brought(destinations: Rows, sources: Rows) -> Iterator[tuple[Rows, Rows]]:
    copies: dict[Device, tuple[list[Array], list[Array]]] = {}  # of each device: here, and there

    def here(array: Array, read: bool) -> Array:
        if isinstance(array, np.ndarray):
            return array
        copy = np.empty(array.shape, array.dtype)
        if read:
            own, theirs = copies.setdefault(home(array), ([], []))
            own.append(copy)
            theirs.append(array)
        return copy

    given = [[here(array, True) for array in row] for row in sources]
    wanted = [[here(array, False) for array in row] for row in destinations]
    for device, (own, theirs) in copies.items():
        device.fetch(own, theirs)
    yield wanted, given
    for row, results in zip(destinations, wanted, strict=True):
        for array, result in zip(row, results, strict=True):
            if array is not result:
                home(array).copy(array, result)
