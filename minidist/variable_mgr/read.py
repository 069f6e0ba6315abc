"""Read: which tensor a replica computes with.

Here are those that give a variable's value of now: `staged.py` has the one that gives an older.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from minidist.device import Device, host
from minidist.tensor import Reading, Tensor
from minidist.variable import Copy, Reader
from minidist.variable_mgr.held import Held
from minidist.variable_mgr.place import LeastLoaded

LARGE = 64 * 1024  # elements from which on a variable is cached on a compute device


class Read(ABC):
    """Answers what replicas read of each variable: `reader` gives one for a new variable.

    The manager calls `before_update` and `after_update`, in the meeting of all replicas, around
    every update of variables there; parts that keep values from step to step do their work then.
    """

    held: Sequence[Held] = ()  # what is kept from step to step

    @abstractmethod
    def reader(self, copies: Sequence[Copy]) -> Reader:
        """Return which of a variable's copies each replica computes with, and how it gets there."""

    def slot(self, copies: Sequence[Copy]) -> Reader:
        """Return the same for what an optimizer keeps beside a variable."""
        return self.reader(copies)

    def before_update(self) -> None:
        """Do what must be done before the variables change."""
        return

    def after_update(self) -> None:
        """Do what must be done once they have changed."""
        return

    def close(self) -> None:
        """Give back what is held beside memory; no replica will read any more."""
        return


class ReadOwn(Read):
    """Each replica reads its own copy."""

    def reader(self, copies: Sequence[Copy]) -> Reader:
        return OwnReader(copies)


class ReadFetched(Read):
    """Each replica reads a copy of the one copy, fetched each step."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def reader(self, copies: Sequence[Copy]) -> Reader:
        return FetchingReader(copies, self._devices)


class ReadCached(Read):
    """Each replica fetches each step from a cache, which is filled once a step.

    Small variables are cached on the host, large ones on the compute device that caches the fewest
    bytes so far. A variable that lives there already is its own cache.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._spread = LeastLoaded(devices)

    def reader(self, copies: Sequence[Copy]) -> Reader:
        array = copies[0].array
        (place,) = self._spread.devices(array.nbytes) if array.size >= LARGE else (host(),)
        return CachingReader(copies, self._devices, place)

    def slot(self, copies: Sequence[Copy]) -> Reader:
        return FetchingReader(copies, self._devices)


class OwnReader(Reader):
    """The replica's own copy."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._tensors = tuple(copy.tensor for copy in copies)

    def read(self, replica: int, step: int) -> Tensor:
        return self._tensors[replica]


class FetchingReader(Reader):
    """A copy of the one copy, fetched to the replica's device when it is first read in a step.

    It is fetched again within a step only if the variable has changed since. A replica that
    computes on the very device where the variable lives reads it there.
    """

    def __init__(self, copies: Sequence[Copy], devices: Sequence[Device]) -> None:
        (self.copy,) = copies
        self.devices = devices
        self._fetched: list[Tensor | None] = [None] * len(devices)
        self._of: list[tuple[int, int]] = [(-1, -1)] * len(devices)  # step and version

    def read(self, replica: int, step: int) -> Tensor:
        copy, device = self.copy, self.devices[replica]
        if device is copy.device:
            return copy.tensor
        tensor = self._fetched[replica]
        if tensor is None:
            buffer = device.allocate(copy.array.shape, copy.array.dtype)
            tensor = self._fetched[replica] = Reading(buffer, device)
        if self._of[replica] != (step, copy.version):
            device.copy(tensor.array, self._origin(step).array)
            self._of[replica] = (step, copy.version)
        return tensor

    def _origin(self, step: int) -> Tensor:
        """Return what is fetched."""
        return self.copy.tensor


class CachingReader(FetchingReader):
    """As a FetchingReader, but from a cache on the device `place`.

    Whichever replica reads first in a step fills the cache. A replica that computes on the cache's
    device reads it there.
    """

    def __init__(self, copies: Sequence[Copy], devices: Sequence[Device], place: Device) -> None:
        super().__init__(copies, devices)
        self._cache = FetchingReader(copies, [place])
        self._place = place
        self._filling = threading.Lock()

    def read(self, replica: int, step: int) -> Tensor:
        if self.devices[replica] is self._place:
            return self._origin(step)
        return super().read(replica, step)

    def _origin(self, step: int) -> Tensor:
        with self._filling:
            return self._cache.read(0, step)
