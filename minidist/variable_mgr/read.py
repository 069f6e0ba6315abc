"""Read: which tensor a replica computes with."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.device import Device
from minidist.tensor import Tensor
from minidist.variable import Copy, Reader


class ReadOwn(Reader):
    """The replica's own copy."""

    def __init__(self, copies: Sequence[Copy], devices: Sequence[Device]) -> None:
        self._tensors = tuple(copy.tensor for copy in copies)

    def read(self, replica: int, step: int) -> Tensor:
        return self._tensors[replica]


class ReadFetched(Reader):
    """A copy of the one copy, fetched to the replica's device when it is first read in a step.

    It is fetched again within a step only if the variable has changed since. A replica that
    computes on the very device where the variable lives reads it there.
    """

    def __init__(self, copies: Sequence[Copy], devices: Sequence[Device]) -> None:
        (self._copy,) = copies
        self._devices = devices
        self._fetched: list[Tensor | None] = [None] * len(devices)
        self._of: list[tuple[int, int]] = [(-1, -1)] * len(devices)  # step and version

    def read(self, replica: int, step: int) -> Tensor:
        copy, device = self._copy, self._devices[replica]
        if device is copy.device:
            return copy.tensor
        tensor = self._fetched[replica]
        if tensor is None:
            buffer = device.allocate(copy.array.shape, copy.array.dtype)
            tensor = self._fetched[replica] = Tensor(buffer, device)
        if self._of[replica] != (step, copy.version):
            device.copy(tensor.array, copy.array)
            self._of[replica] = (step, copy.version)
        return tensor
