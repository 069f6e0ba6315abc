"""Traffic: how many bytes go from device to device, as predicted from shapes alone.

A byte moves from a to b when code of b reads memory of a, or code of a writes memory of b. What
predicts knows no array and never looks at what was measured (minidist.observe), so that the two
can be held against each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from minidist.device import Device

Places = Sequence[Device]  # the device of each tensor of a row


class Outline(NamedTuple):
    """What a prediction knows of an array: its number of elements, and their dtype."""

    size: int
    dtype: Any

    @classmethod
    def of(cls, array: Any) -> Outline:
        """Return that of anything with a shape and a dtype, such as a variable."""
        return cls(math.prod(array.shape), array.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)


class Traffic(Counter[str]):
    """Bytes by link, such as "host->cpu:1". What stays on one device goes over none."""

    def go(self, source: Device, destination: Device, nbytes: int) -> None:
        """Let bytes go from one device to another."""
        if source is not destination and nbytes:
            self[f"{source.short}->{destination.short}"] += nbytes

    def each(self, sources: Places, destinations: Places, tensors: Sequence[Outline]) -> None:
        """Let each tensor of a row go from its device to another."""
        for source, destination, tensor in zip(sources, destinations, tensors, strict=True):
            self.go(source, destination, tensor.nbytes)
