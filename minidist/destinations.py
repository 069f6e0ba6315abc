"""Destinations: the devices that a value is wanted on, and how it gets there.

| destination | its devices |
|---|---|
| `"cpu:1"`, `"cpu*2"`, a Device | itself; see `md.devices` |
| a variable | its copies' |
| a Mirrored or PerReplica value | its components' |
| a Tensor | its own |
| a list of any of these | all of theirs, each once |
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.device import Device, devices, host
from minidist.dtypes import kind
from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.structure import map_leaves
from minidist.tensor import Tensor, to_device
from minidist.values import DistributedValues, Mirrored, PerReplica, local_results
from minidist.variable import Copy, Variable


def devices_of(destinations: Any) -> tuple[Device, ...]:
    """Return the devices of destinations; see the table above.

    Raises UsageError (a ValueError) for what is no destination, and where there is none.
    """
    found = tuple(dict.fromkeys(_found(destinations)))
    if not found:
        raise UsageError("destinations are empty; name a device, or give a variable or a value")
    return found


def _found(destinations: Any) -> Sequence[Device]:
    if isinstance(destinations, str):
        return devices(destinations)
    if isinstance(destinations, Device):
        return (destinations,)
    if isinstance(destinations, Variable):
        return [copy.device for copy in destinations.copies]
    if isinstance(destinations, DistributedValues) and destinations.devices is not None:
        return destinations.devices
    if isinstance(destinations, Tensor | IndexedSlices | Copy):
        return (destinations.device,)
    if isinstance(destinations, list | tuple):
        return [device for each in destinations for device in _found(each)]
    raise UsageError(
        f"{destinations!r} is no destination; give a device, its name, a variable, a distributed "
        "value with devices, or a list of these"
    )


def broadcast(value: Any, wanted: Sequence[Device]) -> Any:
    """Return a structure with each leaf on all of these devices; see Strategy.broadcast."""
    return map_leaves(lambda leaf: _broadcast(leaf, wanted), value)


def _broadcast(leaf: Any, wanted: Sequence[Device]) -> Any:
    if leaf is None or is_number(leaf):
        return leaf
    if isinstance(leaf, PerReplica):
        raise UsageError(
            f"broadcast: a PerReplica value is not one that could be copied: {leaf!r}; reduce it "
            "first"
        )
    if isinstance(leaf, Mirrored) and leaf.devices is not None:
        there = dict(zip(leaf.devices, leaf.values, strict=True))
        first = as_placeable(leaf.values[0], "broadcast")
        return mirrored([as_placeable(there.get(d, first), "broadcast") for d in wanted], wanted)
    return place(as_placeable(local_results(leaf)[0], "broadcast"), wanted)


def place(value: Tensor | IndexedSlices, wanted: Sequence[Device]) -> Any:
    """Return a value on one device, or Mirrored on several."""
    return mirrored([value] * len(wanted), wanted)


def mirrored(values: Sequence[Tensor | IndexedSlices], wanted: Sequence[Device]) -> Any:
    """Return equal values as one, on the devices of the same number."""
    here = [
        to_device(value, device) if isinstance(value, Tensor) else value.to(device)
        for value, device in zip(values, wanted, strict=True)
    ]
    return here[0] if len(here) == 1 else Mirrored(wanted, here)


def is_number(value: Any) -> bool:
    """Whether a value is one of Python's numbers, which are on no device."""
    return isinstance(value, numbers.Number) and not isinstance(value, np.generic)


def as_placeable(value: Any, verb: str) -> Tensor | IndexedSlices:
    """Return what can be brought to a device; an array or a variable as a copy of it.

    Raises UsageError (a ValueError) for what is no array of numbers.
    """
    if isinstance(value, Tensor | IndexedSlices):
        return value
    if isinstance(value, Variable):
        tensor = value.read()
        return Tensor(tensor.device.ops.copy(tensor.array), tensor.device)
    array = np.asarray(value)
    if kind(array.dtype) not in "biuf":
        raise UsageError(f"{verb}: {value!r} is not a number or array of numbers")
    return Tensor(host().copy_in(array.astype(array.dtype.newbyteorder("="), copy=False)), host())
