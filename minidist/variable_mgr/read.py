"""Read: which tensor a replica computes with.

Here are those that give a variable's value of now: `staged.py` has the one that gives an older.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from minidist import observe
from minidist.device import Device, host
from minidist.tensor import Reading, Tensor
from minidist.traffic import Outline, Traffic
from minidist.variable import Copy, Reader, Variable
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

    @abstractmethod
    def predicted_bytes(
        self, variables: Sequence[Variable], read: Sequence[Variable], runs: int
    ) -> Traffic:
        """Return what is moved so that replicas can read, from one update to the next.

        variables: all there are. read: those that every replica reads in each of so many runs.
        """

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

    def predicted_bytes(
        self, variables: Sequence[Variable], read: Sequence[Variable], runs: int
    ) -> Traffic:
        """Nothing moves."""
        return Traffic()


class ReadFetched(Read):
    """Each replica reads a copy of the one copy, fetched each step."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def reader(self, copies: Sequence[Copy]) -> Reader:
        return FetchingReader(copies, self._devices)

    def predicted_bytes(
        self, variables: Sequence[Variable], read: Sequence[Variable], runs: int
    ) -> Traffic:
        """Each variable, from where it is to every replica."""
        return fetched_bytes(read, self._devices, runs)


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

    def predicted_bytes(
        self, variables: Sequence[Variable], read: Sequence[Variable], runs: int
    ) -> Traffic:
        """Each variable, from where it is to its cache, and from there to every replica."""
        traffic = Traffic()
        for variable in read:
            if isinstance(variable.reader, CachingReader):
                home, cache = variable.copies[0].device, variable.reader.place
                nbytes = runs * Outline.of(variable).nbytes
                away = [device for device in self._devices if device is not home]
                if away:
                    traffic.go(home, cache, nbytes)
                for device in away:
                    traffic.go(cache, device, nbytes)
        return traffic


class OwnReader(Reader):
    """The replica's own copy."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = tuple(copies)
        self._tensors = tuple(copy.tensor for copy in copies)

    def read(self, replica: int, step: int) -> Tensor:
        return self._tensors[replica]

    def version(self, replica: int) -> int:
        return self._copies[replica].version


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
            with _told(copy, device) if observe.watching else observe.nothing:
                origin = self._origin(step)
                device.copy(tensor.array, origin.array)
                if observe.counting:
                    nbytes = tensor.array.nbytes
                    observe.moved(origin.device.short, device.short, nbytes, "reads")
            self._of[replica] = (step, copy.version)
        return tensor

    def version(self, replica: int) -> int:
        fetched = self._of[replica][1]
        return self.copy.version if fetched == -1 else fetched

    def _origin(self, step: int) -> Tensor:
        """Return what is fetched."""
        return self.copy.tensor


def fetched_bytes(read: Sequence[Variable], devices: Sequence[Device], runs: int) -> Traffic:
    """Return what every replica's fetching each variable moves, in so many runs."""
    traffic = Traffic()
    for variable in read:
        if isinstance(variable.reader, FetchingReader):
            for device in devices:
                home = variable.copies[0].device
                traffic.go(home, device, runs * Outline.of(variable).nbytes)
    return traffic


def _told(copy: Copy, device: Device) -> AbstractContextManager[None]:
    """Return a with statement's way to tell that a variable is fetched."""
    to, nbytes = device.short, copy.array.nbytes
    return observe.span("fetch", copy.name, device=to, origin=copy.device.short, bytes=nbytes)


class CachingReader(FetchingReader):
    """As a FetchingReader, but from a cache on the device `place`.

    Whichever replica reads first in a step fills the cache. A replica that computes on the cache's
    device reads it there.
    """

    def __init__(self, copies: Sequence[Copy], devices: Sequence[Device], place: Device) -> None:
        super().__init__(copies, devices)
        self._cache = FetchingReader(copies, [place])
        self.place = place
        self._filling = observe.Lock(hands_over=True)

    def read(self, replica: int, step: int) -> Tensor:
        if self.devices[replica] is self.place:
            return self._origin(step)
        return super().read(replica, step)

    def _origin(self, step: int) -> Tensor:
        with self._filling:
            return self._cache.read(0, step)
