"""Communicators: how buffers on several devices meet.

| algorithm | sums | order class |
|---|---|---|
| copy | where every device's memory can be reached, in one pass | serial |
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.base import Communicator
from minidist.comm.local import LocalCommunicator
from minidist.comm.packing import Packer, Row, allocate_row, packer
from minidist.device import Device
from minidist.errors import UsageError

__all__ = ["ALGORITHMS", "Communicator", "Packer", "Row", "allocate_row", "make", "packer"]

ALGORITHMS: dict[str, type[Communicator]] = {
    "copy": LocalCommunicator,
}


def make(algorithm: str, devices: Sequence[Device], packer: Packer | None = None) -> Communicator:
    """Return the communicator of that name for these devices.

    Raises UsageError (a ValueError) for a name there is not.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"no all-reduce algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[algorithm](devices, packer)
