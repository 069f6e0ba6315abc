"""Virtual CPU devices: any number of them share the cores, each with its own streams.

The compute stream is the calling thread itself: work is done where and when it is given. Copy and
communication streams are each a thread that is started at first use and sleeps while idle.
All devices share one memory, so a copy between them is a copy in memory; it is made all the same,
since what a policy costs must be what it would cost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist import observe, threads
from minidist.device.base import Array, Device, Event, Stream, hang, home
from minidist.device.cpu_ops import CpuOps
from minidist.dtypes import as_dtype
from minidist.kernels.heap import Heap
from minidist.kernels.rendezvous import Fence
from minidist.patience import DEADLINE, TICK, stack

SPIN = 100e-6  # seconds that a thread polls for a stream's event before it sleeps


class CpuDevice(Device):
    """One virtual CPU device, or the host."""

    kind = "cpu"
    ops = CpuOps()

    def __init__(self, index: int, short: str, **place: Any) -> None:
        self.heap = Heap()
        super().__init__(index, short, **place)

    def settle(self) -> None:
        self.heap.use()

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        return self.heap.empty(shape, as_dtype(dtype).newbyteorder("="))

    def trim(self) -> None:
        super().trim()
        self.heap.trim()

    def copy_out(self, array: Array) -> np.ndarray[Any, Any]:
        if observe.counting:
            observe.moved(self.short, "host", array.nbytes, "values")
        return np.array(array)

    def copy(self, destination: Array, source: Array) -> None:
        if isinstance(source, np.ndarray):
            np.copyto(destination, source, casting="equiv")  # another byte order is no other dtype
        else:
            home(source).fetch([destination], [source])

    def fetch(self, destinations: Sequence[np.ndarray[Any, Any]], sources: Sequence[Array]) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            np.copyto(destination, source)

    def tie(self, array: Array, owner: object) -> Array:
        return np.asarray(Tied(array, owner)).view(array.dtype)

    def _new_stream(self, role: str) -> Stream:
        return _InlineStream(self, role) if role == "compute" else _ThreadStream(self, role)

    def _end_stream(self, stream: Stream) -> None:
        if isinstance(stream, _ThreadStream):
            stream.end()


class Host(CpuDevice):
    """The host: a device of its own, so that bytes to and from it can be counted."""

    kind = "host"


class Tied:
    """An array's memory, and somebody who is kept alive by it.

    A view of a NumPy array holds the array at the root and none on the way there. But it takes
    this for memory and not for an array, so each view holds it, or an array that does.
    """

    __slots__ = ("__array_interface__", "_owner", "array")

    def __init__(self, array: Array, owner: object) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array
        self._owner = owner


class _Done(Event):
    """The event of a stream that does everything at once."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float = DEADLINE) -> None:
        pass


_DONE = _Done()


class _InlineStream(Stream):
    def submit(self, work: Callable[[], object], *, brief: bool = False) -> None:
        work()

    def record(self) -> Event:
        return _DONE

    def wait(self, event: Event, timeout: float = DEADLINE) -> None:
        event.wait(timeout)


class _Spell:
    """The work of a stream between two failures: after the first, all that follows is skipped."""

    __slots__ = ("failed_at", "failure")

    def __init__(self) -> None:
        self.failed_at = 0
        self.failure: BaseException | None = None


class ThreadEvent(Event):
    """A position in a stream that has a thread: the number of the last piece of work before it."""

    __slots__ = ("_spell", "position", "stream")

    def __init__(self, stream: _ThreadStream, position: int, spell: _Spell) -> None:
        self.stream = stream
        self.position = position
        self._spell = spell

    def done(self) -> bool:
        done: bool = self.stream.finished.value >= self.position
        if done and observe.watching:
            observe.waited(self)
        return done

    def wait(self, timeout: float = DEADLINE) -> None:
        if not observe.watching:
            self._wait(timeout)
            return
        stream = self.stream
        if stream.finished.value >= self.position:
            self._wait(timeout)
        else:
            with observe.span("await", f"{stream.device.short} {stream.role}", role=stream.role):
                self._wait(timeout)
        observe.waited(self)

    def _wait(self, timeout: float) -> None:
        deadline, left = time.monotonic() + timeout, timeout
        if observe.watching:
            observe.waiting(lambda: self.stream.finished.value >= self.position)
        while not self.stream.finished.wait(self.position, min(TICK, left)):
            left = deadline - time.monotonic()
            if left <= 0:
                raise hang(self.stream, timeout, stack(self.stream.thread))
        failure = self._spell.failure
        if failure is not None and self.position >= self._spell.failed_at:
            self.stream.told(self._spell)
            raise failure


class _ThreadStream(Stream):
    """A stream with a thread of its own.

    `given` counts what was submitted and `finished` what was done; an event is a count to reach.
    Brief work that finds nothing before it is done by who submits it: waking the thread would take
    longer. After work has raised, later work is skipped (it may rely on what failed) until somebody
    was told: whoever waits for work that failed or was skipped gets the exception.
    """

    def __init__(self, device: Device, role: str) -> None:
        super().__init__(device, role)
        self.finished = Fence(SPIN)
        self._given = 0
        self._handed_over = Fence()  # raised with each piece of work for the thread
        self._queue: deque[tuple[int, Callable[[], object], _Spell]] = deque()
        self._lock = observe.Lock()  # reentrant: the garbage collector may call what submits
        self._spell = _Spell()
        self.thread = threading.Thread(
            target=self._loop, name=f"minidist {device.short} {role} stream", daemon=True
        )
        threads.start(self.thread)

    def submit(self, work: Callable[[], object], *, brief: bool = False) -> None:
        with self._lock:
            if observe.watching:
                observe.submitted(self, self._given + 1)
            if brief and self.finished.value == self._given:
                self._do(work, self._spell, self._given + 1)
                self._given += 1
                self.finished.advance()
            else:
                self._given += 1
                self._queue.append((self._given, work, self._spell))
                self._handed_over.advance()
                if observe.watching:
                    observe.woke(self.thread)

    def record(self) -> Event:
        event = ThreadEvent(self, self._given, self._spell)
        if observe.watching:
            observe.recorded(event)
        return event

    def wait(self, event: Event, timeout: float = DEADLINE) -> None:
        if isinstance(event, ThreadEvent) and event.stream is self:
            return
        self.submit(lambda: event.wait(timeout), brief=event.done())

    def told(self, spell: _Spell) -> None:
        """Go on: what is given from now on is not skipped for what failed in `spell`."""
        with self._lock:
            if self._spell is spell:
                self._spell = _Spell()

    def end(self) -> None:
        self._handed_over.lift()
        self.thread.join()

    def _has(self, pieces: int) -> bool:
        return self._handed_over.value >= pieces

    def _loop(self) -> None:
        self.device.settle()
        pieces = 0
        while True:
            pieces += 1
            if observe.watching:
                observe.waiting(partial(self._has, pieces))
            self._handed_over.wait(pieces)
            if not self._queue:  # the fence was lifted: nothing will come any more
                return
            position, work, spell = self._queue.popleft()
            if observe.watching:
                name = f"{self.device.short} {self.role}"
                with observe.span("stream", name, position=position):
                    self._do(work, spell, position)
            else:
                self._do(work, spell, position)
            del work  # what it refers to may be freed before the next piece comes
            self.finished.advance()

    def _do(self, work: Callable[[], object], spell: _Spell, position: int) -> None:
        if observe.watching:
            observe.begun(self, position)
        if spell.failure is None:
            try:
                work()
            except BaseException as failure:
                spell.failed_at = position
                spell.failure = failure
        if observe.watching:
            observe.done(self, position)
