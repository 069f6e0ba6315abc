"""Virtual CPU devices: any number of them share the cores, each with its own streams.

The compute stream is the calling thread itself: work is done where and when it is given. Copy and
communication streams are each a thread that is started at first use and sleeps while idle.
All devices share one memory, so a copy between them is a copy in memory; it is made all the same,
since what a policy costs must be what it would cost.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.device.base import ALIGNMENT, Array, Device, Event, Stream, hang
from minidist.device.cpu_ops import CpuOps
from minidist.kernels.rendezvous import Fence


class CpuDevice(Device):
    """One virtual CPU device, or the host."""

    kind = "cpu"
    ops = CpuOps()

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        dtype = np.dtype(dtype).newbyteorder("=")
        nbytes = math.prod(shape) * dtype.itemsize
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def copy_in(self, array: Any) -> Array:
        array = np.asarray(array)
        destination = self.allocate(array.shape, array.dtype)
        np.copyto(destination, array)
        return destination

    def copy_out(self, array: Array) -> np.ndarray[Any, Any]:
        return np.array(array)

    def copy(self, destination: Array, source: Array) -> None:
        np.copyto(destination, source, casting="equiv")  # another byte order is no other dtype

    def _new_stream(self, role: str) -> Stream:
        return _InlineStream(self, role) if role == "compute" else _ThreadStream(self, role)

    def _end_stream(self, stream: Stream) -> None:
        if isinstance(stream, _ThreadStream):
            stream.end()


class Host(CpuDevice):
    """The host: a device of its own, so that bytes to and from it can be counted."""

    kind = "host"


class _Done(Event):
    """The event of a stream that does everything at once."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float = math.inf) -> None:
        pass


class _InlineStream(Stream):
    def submit(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> Event:
        return _Done()

    def wait(self, event: Event) -> None:
        event.wait()


class _ThreadEvent(Event):
    def __init__(self, stream: _ThreadStream, position: int) -> None:
        self.stream = stream
        self.position = position

    def done(self) -> bool:
        return self.stream.finished.value >= self.position

    def wait(self, timeout: float = math.inf) -> None:
        if not self.stream.finished.wait(self.position, timeout):
            raise hang(self.stream, timeout)
        self.stream.raise_failure()


class _ThreadStream(Stream):
    """A stream with a thread of its own.

    `given` counts what was submitted and `finished` what was done; an event is a count to reach.
    After work has raised, later work is skipped (it may rely on what failed) and whoever waits
    gets the exception; then the stream goes on.
    """

    def __init__(self, device: Device, role: str) -> None:
        super().__init__(device, role)
        self.finished = Fence()
        self._given = Fence()
        self._queue: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._loop, name=f"minidist {device.short} {role} stream", daemon=True
        )
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._queue.append(work)
            self._given.advance()

    def record(self) -> Event:
        return _ThreadEvent(self, self._given.value)

    def wait(self, event: Event) -> None:
        if isinstance(event, _ThreadEvent) and event.stream is self:
            return
        self.submit(event.wait)

    def raise_failure(self) -> None:
        """Raise what work of this stream has raised, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        self._given.lift()
        self._thread.join()

    def _loop(self) -> None:
        done = 0
        while True:
            done += 1
            self._given.wait(done)
            if not self._queue:  # the fence was lifted: nothing will come any more
                return
            work = self._queue.popleft()
            if self._failure is None:
                try:
                    work()
                except BaseException as failure:
                    self._failure = failure
            del work  # what it refers to may be freed before the next piece comes
            self.finished.advance()
