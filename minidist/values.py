"""PerReplica and Mirrored: one value for each replica; regroup and select, between the two views.

`regroup` turns what the replicas hold (a list in replica order) into one structure whose leaves
are per-replica values; `select_replica` is its inverse. Structures are pytrees (optree): tuples,
lists, dicts, named tuples, dataclasses, and whatever a user has registered. A leaf that is the very
same object in every replica stays as it is: identity, not equality, says that something is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from minidist import context
from minidist.device import Device
from minidist.device import get as get_device
from minidist.errors import StructureError, UsageError


class DistributedValues:
    """One component for each of several devices."""

    __slots__ = ("devices", "values")

    def __init__(self, devices: Sequence[Device] | None, values: Sequence[Any]) -> None:
        self.values = tuple(values)
        self.devices = None if devices is None else tuple(devices)
        if self.devices is not None and len(self.devices) != len(self.values):
            raise UsageError(
                f"{type(self).__name__} got {len(self.values)} values for {len(self.devices)} "
                "devices; give one for each"
            )

    def get(self, device: str | Device | None = None) -> Any:
        """Return the component on `device`, or the one that the current context is about.

        In a replica it is the replica's own, in an update that of the device being updated; in
        cross-replica context a Mirrored value gives the one on the current device, or its first.
        Raises UsageError (a ValueError) where there is no such component.
        """
        if device is not None:
            return self._on(get_device(device))
        frame = context.frame()
        if frame.replica is not None:
            return self.values[frame.replica.replica_id]
        if frame.update_device is not None:
            return self._on(frame.update_device)
        return self._in_cross_replica(frame.device)

    def _on(self, device: Device) -> Any:
        if self.devices is None or device not in self.devices:
            there = (
                "no devices" if self.devices is None else ", ".join(d.short for d in self.devices)
            )
            raise UsageError(
                f"there is no component on {device.short}; this {type(self).__name__} is on {there}"
            )
        return self.values[self.devices.index(device)]

    def _in_cross_replica(self, device: Device) -> Any:
        raise UsageError(
            f"a {type(self).__name__} has no single value in cross-replica context; name a device, "
            "reduce it, or pass it to strategy.run"
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
        return self._on(device) if self.devices and device in self.devices else self.values[0]


def regroup(
    values: Sequence[Any],
    wrap: Callable[[Sequence[Device] | None, Sequence[Any]], Any] = PerReplica,
    devices: Sequence[Device] | None = None,
) -> Any:
    """Return one structure from the replicas' structures, `values` being in replica order.

    Raises StructureError (a ValueError) where the structures differ.
    """
    first = values[0]
    if all(value is first for value in values):
        return first
    leaves, spec = optree.tree_flatten(first, none_is_leaf=True)
    columns = [leaves]
    for replica, value in enumerate(values[1:], 1):
        other, other_spec = optree.tree_flatten(value, none_is_leaf=True)
        if other_spec != spec:
            raise StructureError(
                f"replicas 0 and {replica} returned different structures, so their values cannot "
                f"be lined up: {spec} and {other_spec}"
            )
        columns.append(other)
    grouped = [
        row[0] if all(item is row[0] for item in row) else wrap(devices, row)
        for row in zip(*columns, strict=True)
    ]
    return optree.tree_unflatten(spec, grouped)


def select_replica(replica: int, structure: Any) -> Any:
    """Return what replica number `replica` has of a structure: the inverse of `regroup`."""
    if isinstance(structure, DistributedValues):
        return structure.values[replica]
    if type(structure) in _PLAIN:
        return structure
    return optree.tree_map(
        lambda leaf: leaf.values[replica] if isinstance(leaf, DistributedValues) else leaf,
        structure,
        none_is_leaf=True,
    )


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def select_device_mirrored(device: Device, structure: Any) -> Any:
    """Return what is on `device` of a structure whose distributed leaves are all Mirrored.

    Raises TypeError at a PerReplica leaf: it has no single value.
    """

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"a PerReplica value has no one component for {device.short}: {leaf!r}; reduce it "
                "first, or pass it through strategy.run"
            )
        return leaf.get(device) if isinstance(leaf, Mirrored) else leaf

    return optree.tree_map(pick, structure, none_is_leaf=True)


def local_results(value: Any) -> tuple[Any, ...]:
    """Return the components in replica order, or a tuple of the value that is not distributed."""
    return value.values if isinstance(value, DistributedValues) else (value,)
