"""PerReplica and Mirrored: one value for each replica; and what one replica or device has of it.

`select_replica` is the way from the whole to a replica's view, minidist.regrouping the way back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

from minidist import context
from minidist.delegate import Delegate
from minidist.device import Device
from minidist.device_map import DeviceMap, replica_map
from minidist.errors import UsageError
from minidist.structure import map_leaves

Devices = DeviceMap | Sequence[str | Device] | None


class DistributedValues(Delegate):
    """One component for each of several devices.

    devices: a DeviceMap, or a device for each replica; None where nobody asks by device.
    values: the components, in the order of the devices.

    Operators and attributes are those of the component that the context is about (see `get`), so
    `loss * 2` and `loss.shape` work on it in a replica. Only `==` and `hash` are the value's own,
    and go by identity. A copy has the same components, a deep copy has copies of them; pickling is
    a TypeError.
    """

    __slots__ = ("device_map", "values")

    def __init__(self, devices: Devices, values: Sequence[Any]) -> None:
        self.values = tuple(values)
        self.device_map = None
        if devices is not None:
            if not isinstance(devices, DeviceMap):
                devices = replica_map(tuple(devices))
            if len(devices.devices) != len(self.values):
                raise UsageError(
                    f"{type(self).__name__} got {len(self.values)} values for {len(devices)} "
                    "devices; give one for each"
                )
            self.device_map = devices

    @property
    def devices(self) -> tuple[Device, ...] | None:
        """The components' devices, or None where they have none."""
        return None if self.device_map is None else self.device_map.devices

    @property
    def is_tensor_like(self) -> bool:
        """Whether every component is; see the function of that name."""
        return all(is_tensor_like(component) for component in self.values)

    def get(self, device: str | Device | None = None) -> Any:
        """Return the component on `device`, or the one that the current context is about.

        In a replica it is the replica's own, in an update that of the device being updated; in
        cross-replica context, and outside all strategies, a Mirrored value gives the one on the
        current device, or its first.
        Raises UsageError (a ValueError) where there is no such component.
        """
        if device is not None:
            return self._on(device)
        frame = context.frame()
        # With no strategy there is a replica too, but none that several components are for.
        if frame.replica is not None and (context.has_strategy() or len(self.values) == 1):
            return self.of_replica(frame.replica.local_id)
        if frame.update_device is not None:
            return self._on(frame.update_device)
        return self._in_cross_replica(frame.device)

    def of_replica(self, replica: int) -> Any:
        """Return the component of a replica. Raises UsageError (a ValueError) if it has none."""
        if self.device_map is not None:
            return self.values[self.device_map.of_replica(replica)]
        if not 0 <= replica < len(self.values):
            raise UsageError(f"there is no component for replica {replica} in {self!r}")
        return self.values[replica]

    def _on(self, device: str | Device) -> Any:
        if self.device_map is None:
            raise UsageError(
                f"there is no component on {device}: this {type(self).__name__} was made "
                "without devices"
            )
        return self.values[self.device_map.of_device(device)]

    def _in_cross_replica(self, device: Device) -> Any:
        raise UsageError(
            f"a {type(self).__name__} has no single value in {context.describe()}; name a device, "
            "reduce it, or pass it to strategy.run"
        )

    def __copy__(self) -> DistributedValues:
        return type(self)(self.device_map, self.values)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedValues:
        return type(self)(self.device_map, copy.deepcopy(self.values, memo))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: its devices belong to this process; take "
            "local_results(value) and pickle the components as arrays"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.values)!r})"


class PerReplica(DistributedValues):
    """A value that differs between replicas."""

    __slots__ = ()


class Mirrored(DistributedValues):
    """The same value, held on several devices."""

    __slots__ = ()

    def _in_cross_replica(self, device: Device) -> Any:
        return self._on(device) if device in (self.devices or ()) else self.values[0]


def is_tensor_like(value: Any) -> bool:
    """Whether a value is a Tensor, a variable or an array: has a shape and a dtype of its own.

    Of a distributed value, all components must be.
    """
    if isinstance(value, DistributedValues):
        return value.is_tensor_like
    return hasattr(value, "shape") and hasattr(value, "dtype")


def select_replica(replica: int, structure: Any) -> Any:
    """Return what replica number `replica` has of a structure: the inverse of `regroup`.

    A structure without distributed values in it is returned itself.
    """

    def select(leaf: Any) -> Any:
        return leaf.of_replica(replica) if isinstance(leaf, DistributedValues) else leaf

    return map_leaves(select, structure)


def select_device_mirrored(device: Device, structure: Any) -> Any:
    """Return what is on `device` of a structure whose distributed leaves are all Mirrored.

    Raises TypeError at a PerReplica leaf: it has no single value.
    """

    def select(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"a PerReplica value has no one component for {device.short}: {leaf!r}; reduce it "
                "first, or pass it through strategy.run"
            )
        return leaf.get(device) if isinstance(leaf, DistributedValues) else leaf

    return map_leaves(select, structure)


def local_results(value: Any) -> tuple[Any, ...]:
    """Return the components in replica order, or a tuple of the value that is not distributed."""
    return value.values if isinstance(value, DistributedValues) else (value,)
