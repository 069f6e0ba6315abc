"""Placing: a round's arrays onto the devices of the replicas that will compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist import observe
from minidist.device import Device
from minidist.input.rounds import Round
from minidist.structure import leaves, map_leaves
from minidist.tensor import Tensor
from minidist.values import PerReplica


def place(item: Round, devices: Sequence[Device]) -> Any:
    """Return the round as a structure of PerReplica Tensors, each part on its replica's device.

    On return all has been read, so the source may use its arrays again.
    """

    def start(leaf: Any) -> Any:
        return _start_copying(leaf, devices) if isinstance(leaf, PerReplica) else leaf

    placed = map_leaves(start, item.values)
    for copied in [device.stream("copy").record() for device in devices]:
        copied.precede()
    if observe.counting:
        _tell(placed, devices)
    return placed


def _start_copying(parts: PerReplica, devices: Sequence[Device]) -> PerReplica:
    tensors = []
    for device, part in zip(devices, parts.values, strict=True):
        buffer = device.allocate(part.shape, part.dtype)
        device.stream("copy").copy(buffer, part)
        tensors.append(Tensor(buffer, device))
    return PerReplica(devices, tensors)


def _tell(placed: Any, devices: Sequence[Device]) -> None:
    """Tell once for each device what has gone there from the host."""
    parts = [leaf for leaf in leaves(placed) if isinstance(leaf, PerReplica)]
    for replica, device in enumerate(devices):
        nbytes = sum(part.values[replica].array.nbytes for part in parts)
        observe.moved("host", device.short, nbytes, "input")
