"""Input for replicas: global batches, split and placed on the replicas' devices.

A batch of b examples over n replicas is split along the first axis, larger parts first: the first
b mod n replicas get one example more. A replica may get an empty part; it still runs (its loss is
0, its gradient zero, its count 0), so that all replicas make the same meetings.

While a step computes, the next batch is already copied to the devices, on their copy streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from minidist.device import Device, Event
from minidist.errors import ShapeError
from minidist.tensor import Tensor
from minidist.values import PerReplica


def split_sizes(examples: int, replicas: int) -> list[int]:
    """Return how many of a global batch's examples each replica gets, larger parts first."""
    share, more = divmod(examples, replicas)
    return [share + (replica < more) for replica in range(replicas)]


_Placed = tuple[Any, list[Event]]


@dataclass(frozen=True)
class _End:
    """The end of the source, by an exception or not."""

    failure: Exception | None


class DistributedDataset:
    """Iterates over global batches (structures of arrays), each as a PerReplica structure."""

    def __init__(self, batches: Iterable[Any], devices: Sequence[Device]) -> None:
        self._batches = batches
        self._devices = tuple(devices)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._batches)
        placed = self._read(source)
        while not isinstance(placed, _End):
            following = self._read(source)
            batch, copies = placed
            for copy in copies:
                copy.wait()
            yield batch
            placed = following
        if placed.failure is not None:
            raise placed.failure

    def _read(self, source: Iterator[Any]) -> _Placed | _End:
        """Read a batch and start copying it; what the source raises waits until its turn."""
        try:
            return self._place(next(source))
        except StopIteration:
            return _End(None)
        except Exception as failure:
            return _End(failure)

    def _place(self, batch: Any) -> _Placed:
        """Start copying a batch to the devices; return the structure and the copies' events."""
        leaves, spec = optree.tree_flatten(batch)
        arrays = [leaf.numpy() if isinstance(leaf, Tensor) else np.asarray(leaf) for leaf in leaves]
        for array in arrays:
            if array.ndim == 0 or len(array) != len(arrays[0]):
                raise ShapeError(
                    "the arrays of a global batch must have the same first dimension, its "
                    f"examples; they have shapes {[list(array.shape) for array in arrays]}"
                )
        ends = np.cumsum(split_sizes(len(arrays[0]), len(self._devices)))
        placed = []
        for array in arrays:
            parts = []
            start = 0
            for device, end in zip(self._devices, ends, strict=True):
                part = array[start:end]
                buffer = device.allocate(part.shape, part.dtype)
                device.stream("copy").copy(buffer, part)
                parts.append(Tensor(buffer, device))
                start = end
            placed.append(PerReplica(self._devices, parts))
        events = [device.stream("copy").record() for device in self._devices]
        return optree.tree_unflatten(spec, placed), events
