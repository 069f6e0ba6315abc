"""Place: where the copies of a variable live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minidist.device import Device, host


class Place(Protocol):
    """Answers where the copies of a new variable live."""

    def devices(self, nbytes: int) -> Sequence[Device]:
        """Return the devices of the copies of a variable of `nbytes` bytes, made now."""


class EveryReplica:
    """A copy with every replica."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)

    def devices(self, nbytes: int) -> Sequence[Device]:
        return self._devices


class OnHost:
    """One copy, on the host."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = (host(),)

    def devices(self, nbytes: int) -> Sequence[Device]:
        return self._devices


class LeastLoaded:
    """One copy, on the compute device that holds the fewest bytes so far; the first of equals."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._load = dict.fromkeys(devices, 0)

    def devices(self, nbytes: int) -> Sequence[Device]:
        device = min(self._load, key=self._load.__getitem__)
        self._load[device] += nbytes
        return (device,)
