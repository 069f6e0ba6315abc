"""Scratch: buffers that are leased for the length of one call, so that the next one has them too.

Every call leases its own, so several threads may be in one algorithm at the same time; and a call
like the one before finds its buffers in the pool, so in the steady state nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import Any

from minidist.comm.row import Row
from minidist.device import Array, Device, Lease, host
from minidist.kernels.reduce import offsets


class Scratch:
    """Leases until the end of a with statement."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give all buffers back."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()

    def flat(self, device: Device, length: int, dtype: Any) -> Array:
        """Return a buffer of so many elements, not initialised."""
        lease = device.lease((length,), dtype)
        self._leases.append(lease)
        return lease.array

    def row(self, device: Device, like: Row, dtype: Any = None) -> Row:
        """Return arrays shaped like those of a row of one dtype, in one buffer on a device."""
        if dtype is None:
            dtype = like[0].dtype
        return laid(self.flat(device, room(like, dtype), dtype), like, device)

    def like(self, device: Device, row: Sequence[Array]) -> Row:
        """Return arrays shaped like those of a row of any dtypes, on a device."""
        arrays = [self.flat(device, array.size, array.dtype).reshape(array.shape) for array in row]
        return Row.on(device, arrays)

    def spread(self, devices: Sequence[Device], like: Row, turn: int = 0) -> Row:
        """Return arrays shaped like those of a row, the i-th on device i + `turn` modulo all."""
        count = len(devices)
        spread = Row(like, [devices[(i + turn) % count] for i in range(len(like))])
        for first in range(min(count, len(like))):
            members = range(first, len(like), count)
            spread[first::count] = self.row(spread.devices[first], like.part(members))
        return spread


def room(row: Row, dtype: Any) -> int:
    """Return how many elements of that dtype `laid` needs for a row."""
    total: int = offsets([array.shape for array in row], dtype.itemsize)[1]
    return total


def laid(flat: Array, row: Row, device: Device) -> Row:
    """Return arrays shaped like a row's, one behind the other in a buffer, each 64-byte aligned."""
    starts, _ = offsets([array.shape for array in row], flat.dtype.itemsize)
    arrays = [
        flat[start : start + prod(array.shape)].reshape(array.shape)
        for start, array in zip(starts, row, strict=True)
    ]
    return Row.on(device, arrays)


def in_a_row(flat: Array, sizes: Sequence[int]) -> Row:
    """Return flat arrays of so many elements, directly one behind the other in a host's buffer."""
    arrays, start = [], 0
    for size in sizes:
        arrays.append(flat[start : start + size])
        start += size
    return Row.on(host(), arrays)
