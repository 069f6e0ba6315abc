"""Place: where the copies of a variable live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minidist.device import Device, host
from minidist.variable import AggregatingVariable, MirroredVariable, Variable


class Place(Protocol):
    """Answers where the copies of a new variable live, and so of which kind it is."""

    kind: type[Variable]

    def devices(self, nbytes: int, beside: Device | None = None) -> Sequence[Device]:
        """Return the devices of the copies of a variable of `nbytes` bytes, made now.

        `beside` is where it should go, if it is to have one copy: beside another variable.
        """


class EveryReplica:
    """A copy with every replica."""

    kind: type[Variable] = MirroredVariable

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)

    def devices(self, nbytes: int, beside: Device | None = None) -> Sequence[Device]:
        return self._devices


class OnHost:
    """One copy, on the host."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.kind = _of_one_copy(devices)
        self._host = host()

    def devices(self, nbytes: int, beside: Device | None = None) -> Sequence[Device]:
        return (beside or self._host,)


class LeastLoaded:
    """One copy, on the compute device that holds the fewest bytes so far; the first of equals."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.kind = _of_one_copy(devices)
        self._load = dict.fromkeys(devices, 0)

    def devices(self, nbytes: int, beside: Device | None = None) -> Sequence[Device]:
        device = beside or min(self._load, key=self._load.__getitem__)
        self._load[device] += nbytes
        return (device,)


def _of_one_copy(replicas: Sequence[Device]) -> type[Variable]:
    """Return the kind of a variable with one copy: who is alone has nothing to aggregate."""
    return AggregatingVariable if len(replicas) > 1 else Variable
