"""Communicator: how buffers on several devices meet. It knows arrays and devices, not variables.

The public verbs check what they are given, so that a mistake is named before any byte moves, and
pack it; an implementation fills in the hook. A *row* is a list of arrays, and every replica gives a
row with the same shapes and dtypes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minidist.comm.packing import Packer, Row
from minidist.device import Device
from minidist.errors import ShapeError, UsageError


class Communicator(ABC):
    """Moves rows of arrays between the devices of one strategy."""

    def __init__(self, devices: Sequence[Device], packer: Packer | None = None) -> None:
        self._device = devices[0]
        self._packer = packer

    def reduce(
        self,
        sources: Sequence[Row],
        destination: Row,
        weights: Sequence[float] | None = None,
        *,
        scale: float = 1.0,
        threads: int,
    ) -> None:
        """Put the sum over the replicas, in replica order, times `scale`, into one row.

        With weights it is Σ(w_i·x_i)·scale. Weights and scale are for floating-point rows. Runs on
        the calling thread with up to `threads` of the machine's.
        Raises ShapeError naming the replica whose row does not fit.
        """
        self.all_reduce(sources, [destination], weights, scale=scale, threads=threads)

    def all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None = None,
        *,
        scale: float = 1.0,
        threads: int,
    ) -> None:
        """Put the same sum into several rows, one on each device that wants it."""
        _check(sources, "all_reduce")
        if not destinations:
            raise UsageError("all_reduce has no destination; give a row for each device")
        if self._packer is None:
            self._all_reduce(sources, destinations, weights, scale, threads)
            return
        with self._packer.packed(sources, destinations, self._device) as (given, wanted):
            self._all_reduce(given, wanted, weights, scale, threads)

    @abstractmethod
    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None: ...


def _check(rows: Sequence[Row], verb: str) -> None:
    first = rows[0]
    for replica, row in enumerate(rows[1:], 1):
        if len(row) != len(first):
            raise ShapeError(
                f"{verb}: replica 0 gives {len(first)} tensors and replica {replica} gives "
                f"{len(row)}; all replicas must give the same"
            )
        for i, (ours, theirs) in enumerate(zip(first, row, strict=True)):
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                raise ShapeError(
                    f"{verb}: tensor {i} is {ours.dtype}{list(ours.shape)} in replica 0 and "
                    f"{theirs.dtype}{list(theirs.shape)} in replica {replica}"
                )
