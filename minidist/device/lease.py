"""Lease: buffers that are used again, each once nobody reads it any more.

A pool has the buffers. Who leases one says on returning it after which events, those of its
readers, it may be used again. Who does not know of leases gets a *loan*: arrays that are views of
the buffer, which goes back when the last of them is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist import observe
from minidist.errors import UsageError

if TYPE_CHECKING:
    from minidist.device.base import Array, Device, Event, Stream


class Lease:
    """A buffer out of a pool: `array` is valid until `release`."""

    __slots__ = ("_pool", "array")

    def __init__(self, array: Array, pool: Pool) -> None:
        self.array = array
        self._pool: Pool | None = pool

    def release(self, after: Sequence[Event] = (), *, shared: bool = False) -> None:
        """Give the buffer back, for use again once all `after` (its readers' events) are done.

        shared: whether it was in the hands of those who only drop it.
        """
        if self._pool is None:
            raise UsageError(
                "a lease was released twice: its buffer may already be somebody else's"
            )
        pool, self._pool = self._pool, None
        if observe.watching:
            observe.given_back(self.array, after, shared)
        pool.give_back(self.array, tuple(after))
        self.array = None


class Loan:
    """A leased buffer in the hands of those who only drop it: with the loan, the lease ends.

    `array` is the buffer; it and all views of it hold the loan. Whoever reads it on a stream says
    so in `readers`: the buffer is used again after what those streams have been given until the
    last view is gone, and after the events `written`.
    """

    __slots__ = ("__weakref__", "_lease", "readers", "written")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.readers: set[Stream] = set()
        self.written: list[Event] = []

    def array(self, device: Device) -> Array:
        """Return the buffer, of `device`."""
        return device.tie(self._lease.array, self)

    def __del__(self) -> None:
        # Called anywhere, by any thread, also in the middle of a lease: it must take no lock.
        after = [*self.written, *(stream.record() for stream in self.readers)]
        self._lease.release(after, shared=True)


class Pool:
    """Buffers that are used again, by shape and dtype."""

    def __init__(self, allocate: Callable[[tuple[int, ...], Any], Array]) -> None:
        self._allocate = allocate
        self._lock = observe.Lock()
        self._closed = False
        self._free: dict[
            tuple[tuple[int, ...], np.dtype[Any]], list[tuple[Array, tuple[Event, ...]]]
        ] = {}

    def lease(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], on: Stream | None = None
    ) -> Lease:
        """Borrow a buffer that nobody reads any more; make one if there is none.

        One that is to be written on a stream may still be read: then the stream waits.
        """
        with self._lock:
            waiting = self._free.get((shape, dtype), [])
            for i, (array, events) in enumerate(waiting):
                if all(event.done() for event in events):
                    del waiting[i]
                    return self._again(array)
            if waiting and on is not None:
                array, events = waiting.pop(0)
                for event in events:
                    on.wait(event)
                return self._again(array)
        return Lease(self._allocate(shape, dtype), self)

    def _again(self, array: Array) -> Lease:
        if observe.watching:
            observe.leased(array)
        return Lease(array, self)

    def give_back(self, array: Array, events: tuple[Event, ...]) -> None:
        # Without the lock: a Loan may end while this thread holds it. Appending is atomic.
        if not self._closed:
            self._free.setdefault((array.shape, array.dtype), []).append((array, events))

    def clear(self) -> None:
        """Free the buffers that are here."""
        self._free.clear()

    def close(self) -> None:
        """Free the buffers that are here, and each that comes back, as soon as it does."""
        self._closed = True
        self.clear()
