"""Streams of a GPU, which order themselves: each knows how far it has seen the others.

A thread hands work to a GPU and goes on. So what threads have ordered among themselves, by meetings
or by locks, must be ordered once more on the streams that do it. Nobody above writes that down:

  * A stream counts what it is given; a *position* is such a count. `seen` says up to which position
    of each other stream everything is done before what this one is given next.
  * A block of memory (cuda_memory.py) knows the position that last wrote it, and those that read it
    since. Whoever touches it lets its stream `follow` these.
  * A stream that has not seen a position waits for an event of the other one, recorded after it.

So a stream waits for another where they share memory, and nowhere else. These are the vector clocks
of Lamport (1978) and Mattern (1989), which the race checker uses to find what nothing orders.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import cupy

from minidist import observe
from minidist.device.base import Event, Stream, hang
from minidist.device.cuda_dnn import Convolutions, convolutions
from minidist.device.cuda_times import Moment, clock, happened
from minidist.patience import DEADLINE, TICK

if TYPE_CHECKING:
    from minidist.device.cuda import CudaDevice
    from minidist.device.cuda_machine import Slots

SPIN = 100e-6  # seconds that a thread asks for an event again and again before it sleeps
NAP = 50e-6  # seconds that it sleeps from then on between two questions
MARKS = 8  # the latest events of a stream that others may wait for instead of a new one


class Watcher(Protocol):
    """Somebody who gives streams what may fail there, or never end: a library that meets others."""

    def look(self, waited: float, timeout: float) -> None:
        """Raise what has gone wrong; called by who has waited so long for a stream, of a timeout.

        Once that is over, what is under way is given up.
        """


class _Here(threading.local):
    """The role of the streams that the calling thread gives work to."""

    role = "compute"


_here = _Here()


class CudaEvent(Event):
    """A position in a stream. Its CUDA event serves one use, and then another one."""

    __slots__ = ("position", "raw", "seen", "stream")

    def __init__(self, stream: CudaStream) -> None:
        # In this order: what is counted here was given before the CUDA event is recorded.
        self.position = stream.given
        self.seen = dict(stream.seen)
        self.stream = stream
        self.raw = stream.device.take_event()
        self.raw.record(stream.raw)
        if observe.watching:
            observe.recorded(self)

    def __del__(self) -> None:
        # Streams that wait for it hold what was recorded, and no thread can ask for it any more.
        if hasattr(self, "raw"):
            self.stream.device.events.append(self.raw)

    def done(self) -> bool:
        done = happened(self.raw, self.stream)
        if done and observe.watching:
            observe.waited(self)
        return done

    def precede(self, timeout: float = DEADLINE) -> None:
        """Do nothing: whoever touches the same memory follows."""

    def wait(self, timeout: float = DEADLINE) -> None:
        if not observe.watching or self.done():
            self._wait(timeout)
            return
        observe.waiting(self.done)
        role = self.stream.role
        with observe.span("await", f"{self.stream.device.short} {role}", role=role):
            self._wait(timeout)

    def _wait(self, timeout: float) -> None:
        start = looked = time.monotonic()
        while not self.done():
            now = time.monotonic()
            waited = now - start
            if now - looked > TICK or waited > timeout:
                self._look(waited, timeout)
                looked = now
            if waited > timeout:
                raise hang(self.stream, timeout, f"position {self.position} of {self.stream!r}")
            time.sleep(0 if waited < SPIN else min(NAP, timeout - waited))
        self._look(time.monotonic() - start, math.inf)  # what has ended may have failed

    def _look(self, waited: float, timeout: float) -> None:
        for stream in (self.stream, *self.seen):
            for watcher in list(stream.watchers):
                watcher.look(waited, timeout)


class CudaStream(Stream):
    """A CUDA stream. Work is begun on the thread that submits it, and done on the GPU."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, role: str, raw: Any) -> None:
        super().__init__(device, role)
        self.raw = raw
        self.given = 0
        self.seen: dict[CudaStream, int] = {}
        self.watchers: WeakSet[Watcher] = WeakSet()
        self.constants: dict[
            tuple[Any, ...], Slots
        ] = {}  # who gives it work looks, see CudaMachine
        self._marks: deque[CudaEvent] = deque(maxlen=MARKS)
        self._lock = threading.RLock()
        self._depth = 0
        self._blas: Any = None
        self._dnn: list[Convolutions | None] = []  # none at first: whether there is one is unknown

    @property
    def blas(self) -> Any:
        """A handle of cuBLAS for this stream alone: it has memory that a product works in."""
        if self._blas is None:
            self._blas = cupy.cuda.cublas.create()
        return self._blas

    @property
    def dnn(self) -> Convolutions | None:
        """What does convolutions here by cuDNN, if anything does."""
        if not self._dnn:
            self._dnn.append(convolutions(self))
        return self._dnn[0]

    def end(self) -> None:
        """Free what CuPy does not free by itself."""
        while self._dnn:
            if (dnn := self._dnn.pop()) is not None:
                dnn.end()
        if self._blas is not None:
            cupy.cuda.cublas.destroy(self._blas)
            self._blas = None
        self.constants.clear()

    @property
    def next(self) -> int:
        """The position of what is being given now."""
        return self.given + 1

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Let the calling thread alone give this stream one more piece of work."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self.given += 1  # only now: who records meanwhile has not seen all of it

    def moment(self) -> Moment:
        """Return when this stream comes to where it is now given something."""
        return Moment(self)

    def clock(self) -> Callable[[Moment], int]:
        """Return what says when moments of this stream were; it is waited for."""
        return clock(self)

    def submit(self, work: Callable[[], object], *, brief: bool = False) -> None:
        """Call `work`; what it gives to devices goes to their streams of this role.

        What it raises is raised here. Where it waits for a thread, so does the caller.
        """
        before, _here.role = _here.role, self.role
        try:
            work()
        finally:
            _here.role = before

    def record(self) -> CudaEvent:
        event = CudaEvent(self)
        self._marks.append(event)
        return event

    def wait(self, event: Event, timeout: float = DEADLINE) -> None:
        if not isinstance(event, CudaEvent):
            event.wait(timeout)  # of a stream that has a thread
            return
        if event.stream is not self and self.seen.get(event.stream, 0) < event.position:
            self._wait(event)

    def _wait(self, event: CudaEvent) -> None:
        self.raw.wait_event(event.raw)
        if observe.watching:
            observe.followed(self, event)
        for stream, position in (*event.seen.items(), (event.stream, event.position)):
            if stream is not self and self.seen.get(stream, 0) < position:
                self.seen[stream] = position

    def follow(self, other: CudaStream, position: int) -> None:
        """Let what is given from now on start only after a position of another stream."""
        if other is not self and self.seen.get(other, 0) < position:
            # The position may be of a piece that a thread is giving now: then the event counts as
            # one before it, though it is recorded after what is waited for.
            self._wait(other.after(position))

    def after(self, position: int) -> CudaEvent:
        """Return an event that does not happen before that position is done."""
        for event in list(self._marks):  # the oldest first: it is done the soonest
            if event.position >= position:
                return event
        return self.record()


def role() -> str:
    """Return the role of the streams that the calling thread gives work to."""
    return _here.role
