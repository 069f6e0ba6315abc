"""Device, Stream and Event: where arrays live, and in what order work on them happens.

One kind of device is one subclass. The base holds what is the same for all.

A *stream* does its work in the order given. An *event* marks a position in one stream: it has
happened once all work given to the stream before `record` is done. Another stream, or a thread,
can wait for it. That is all the ordering there is between streams.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from minidist import observe
from minidist.device import room
from minidist.device.lease import Lease, Pool
from minidist.dtypes import as_dtype
from minidist.errors import HangError, UsageError
from minidist.patience import DEADLINE

if TYPE_CHECKING:
    from minidist.device.ops import Ops

T = TypeVar("T")

Array = Any  # what this kind of device calls an array: numpy.ndarray, cupy.ndarray
ALIGNMENT = 64  # bytes; a cache line, and the widest vector of any x86-64
STREAMS = ("compute", "copy", "communication")


class Event(ABC):
    """A position in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before it has been done."""

    @abstractmethod
    def wait(self, timeout: float = DEADLINE) -> None:
        """Block the calling thread until it has happened.

        Raises HangError after `timeout` seconds (math.inf: never), and whatever the stream's work
        has raised.
        """

    def precede(self, timeout: float = DEADLINE) -> None:
        """Let it precede what the calling thread does from now on with the same memory.

        Streams that order what they are given see to that by themselves, and the thread goes on;
        for others it waits, and `wait` says what is raised.
        """
        self.wait(timeout)


class Stream(ABC):
    """Work on one device that is done in the order in which it is given."""

    def __init__(self, device: Device, role: str) -> None:
        self.device = device
        self.role = role

    @abstractmethod
    def submit(self, work: Callable[[], object], *, brief: bool = False) -> None:
        """Do `work` after everything given before; what it refers to is kept alive until then.

        What is `brief`, some microseconds, the caller may have to do itself, where nothing is
        given before and handing over would cost more.
        """

    @abstractmethod
    def record(self) -> Event:
        """Return the event of having done everything given so far."""

    @abstractmethod
    def wait(self, event: Event, timeout: float = DEADLINE) -> None:
        """Let what is given from now on start only after `event`, of any stream or device.

        A stream whose work the calling thread does itself blocks; then the event's `wait` says
        what is raised.
        """

    def synchronize(self, timeout: float = DEADLINE) -> None:
        """Block the calling thread until everything given so far is done."""
        self.record().wait(timeout)

    def copy(self, destination: Array, source: Array) -> None:
        """Copy `source`, of any device that this one can reach, into `destination`, same shape."""
        self.submit(lambda: self.device.copy(destination, source))

    def __repr__(self) -> str:
        return f"<{self.role} stream of {self.device.short}>"


class Device(ABC):
    """A place where arrays live and that computes on them.

    `name` is canonical, "/job:worker/task:0/device:CPU:1"; `short` is "cpu:1", or "host".
    `ops` holds the arithmetic on this kind of device.
    """

    kind: str
    ops: Ops

    def __init__(self, index: int, short: str, *, job: str = "worker", task: int = 0) -> None:
        self.index = index
        self.short = short
        self.name = f"/job:{job}/task:{task}/device:{self.kind.upper()}:{index}"
        self.renew()

    def renew(self) -> None:
        """Begin with no streams and no pooled buffers, as a forked child must.

        The parent's streams have no threads there, and a lock may be held by one of them for ever.
        """
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()
        self._pool = Pool(self.allocate)

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an uninitialised, C-contiguous array whose first byte is 64-byte aligned."""

    @abstractmethod
    def settle(self) -> None:
        """Let what verbs make for the calling thread, in its context, lie in this device's memory.

        Where verbs ask for memory by the name of the device, it does so anyway.
        """

    def copy_in(self, array: Any) -> Array:
        """Return a copy on this device of an array in the host's memory."""
        array = np.asarray(array)
        destination = self.allocate(array.shape, array.dtype)
        self.copy(destination, array)
        if observe.counting:
            observe.moved("host", self.short, array.nbytes, "values")
        return destination

    @abstractmethod
    def copy_out(self, array: Array) -> np.ndarray[Any, Any]:
        """Return a copy in the host's memory of an array of this device."""

    @abstractmethod
    def copy(self, destination: Array, source: Array) -> None:
        """Copy `source` of any device of this kind or the host into `destination` here."""

    @abstractmethod
    def fetch(self, destinations: Sequence[np.ndarray[Any, Any]], sources: Sequence[Array]) -> None:
        """Copy arrays of this device into the host's, one each, where they have then arrived."""

    def lend(self, array: Array, how: Callable[[Array], T]) -> T:
        """Return `how(array)`, by which somebody else than minidist will read the array.

        On a GPU that names or makes wait a stream: what it reads is then all written.
        """
        return how(array)

    @abstractmethod
    def tie(self, array: Array, owner: object) -> Array:
        """Return a view of `array`; it keeps `owner` alive, and so does every view of it."""

    @abstractmethod
    def _new_stream(self, role: str) -> Stream: ...

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self  # the one device of its name, also in a copy of what lives on it

    def lease(self, shape: Sequence[int], dtype: Any) -> Lease:
        """Borrow a buffer; in the steady state that allocates nothing."""
        return self._pool.lease(tuple(shape), as_dtype(dtype))

    def stream(self, role: str) -> Stream:
        """Return the stream for "compute", "copy" or "communication", made at first use."""
        if role not in STREAMS:
            raise UsageError(f"no stream is called {role!r}; there are {', '.join(STREAMS)}")
        with self._lock:
            if role not in self._streams:
                self._streams[role] = self._new_stream(role)
            return self._streams[role]

    @property
    def streams(self) -> list[Stream]:
        """Those that were asked for so far."""
        return list(self._streams.values())

    def synchronize(self, timeout: float = DEADLINE) -> None:
        """Block the calling thread until all streams of this device have done what they were given.

        Raises HangError after `timeout` seconds.
        """
        for stream in self.streams:
            stream.synchronize(timeout)

    def room(self) -> int:
        """Return how many bytes may still be taken here, about."""
        return room.of_host()

    def trim(self) -> None:
        """Free the pooled buffers that nobody holds; they are made anew when they are needed."""
        self._pool.clear()

    def close(self) -> None:
        """End the streams' threads, after the work they have, and drop pooled buffers."""
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.synchronize()
            self._end_stream(stream)
        self.trim()

    @abstractmethod
    def _end_stream(self, stream: Stream) -> None:
        """Free what `stream`, which has nothing left to do, holds beyond memory."""

    def __repr__(self) -> str:
        return f"<Device {self.name}>"


def home(array: Array) -> Device:
    """Return the device of an array that is no NumPy array: its memory knows."""
    device: Device = array.data.mem.block.on
    return device


def hang(stream: Stream, timeout: float, where: str) -> HangError:
    """Return the error for a stream that was waited for too long and is at `where`."""
    return HangError(
        f"the {stream.role} stream of {stream.device.short} did not finish its work within "
        f"{timeout:g} s; it is now at\n{where}"
    )
