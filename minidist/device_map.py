"""DeviceMap: which component of a distributed value belongs to a device, and which to a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import lru_cache

from minidist.device import Device
from minidist.device import get as get_device
from minidist.errors import UsageError


class DeviceMap(ABC):
    """The devices of a value's components, in their order; a sequence of Device objects.

    Raises UsageError (a ValueError) where there are none, or two names mean the same device.
    Replicas that share one GPU have devices of their own ("cuda:0.0", "cuda:0.1").
    """

    __slots__ = ("devices",)

    def __init__(self, devices: Iterable[str | Device]) -> None:
        self.devices = tuple([get_device(device) for device in devices])
        if not self.devices:
            raise UsageError(f"a {type(self).__name__} needs at least one device")
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(
                f"{self} names a device twice, so it would not say whose component is meant; "
                "give each component a device of its own"
            )

    def of_device(self, device: str | Device) -> int:
        """Return the number of the component on a device. Raises UsageError if there is none."""
        device = get_device(device)
        if device not in self.devices:
            raise UsageError(f"there is no component on {device.short}, only on {self._names()}")
        return self.devices.index(device)

    @abstractmethod
    def of_replica(self, replica: int) -> int:
        """Return the number of the component of a replica. Raises UsageError if there is none."""

    def _names(self) -> str:
        return ", ".join(device.short for device in self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def __getitem__(self, index: int) -> Device:
        return self.devices[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._names()})"


class ReplicaDeviceMap(DeviceMap):
    """A component for each replica, on the replica's device."""

    __slots__ = ()

    def of_replica(self, replica: int) -> int:
        if not 0 <= replica < len(self.devices):
            raise UsageError(
                f"there is no component for replica {replica}, only for {len(self.devices)} "
                f"replicas, on {self._names()}"
            )
        return replica


class SingleDeviceMap(DeviceMap):
    """One component, on one device, that is no replica's."""

    __slots__ = ()

    def __init__(self, device: str | Device) -> None:
        super().__init__([device])

    def of_replica(self, replica: int) -> int:
        raise UsageError(
            f"{self} has one component that is no replica's, so there is none for replica "
            f"{replica}; name the device"
        )


class WorkerDeviceMap(DeviceMap):
    """A component for each worker, which the worker's replicas share."""

    __slots__ = ("replicas_per_worker",)

    def __init__(self, devices: Iterable[str | Device], replicas_per_worker: int) -> None:
        super().__init__(devices)
        if replicas_per_worker < 1:
            raise UsageError(f"{self}: each worker has at least 1 replica, {replicas_per_worker=}")
        self.replicas_per_worker = replicas_per_worker

    def of_replica(self, replica: int) -> int:
        worker = replica // self.replicas_per_worker
        if not 0 <= worker < len(self.devices):
            raise UsageError(
                f"there is no component for replica {replica}, only for {len(self.devices)} "
                f"workers of {self.replicas_per_worker} replicas, on {self._names()}"
            )
        return worker


@lru_cache(maxsize=256)
def replica_map(devices: tuple[str | Device, ...]) -> ReplicaDeviceMap:
    """Return the map of replica i to devices[i]; the same one for the same devices."""
    return ReplicaDeviceMap(devices)
