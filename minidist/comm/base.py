"""Communicator: how buffers on several devices meet. It knows arrays and devices, not variables.

The public verbs check what they are given, so that a mistake is named before any byte moves; an
implementation fills in the hooks. A *row* is a list of arrays, and every replica gives a row with
the same shapes and dtypes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minidist.device import Array
from minidist.errors import ShapeError

Row = Sequence[Array]


class Communicator(ABC):
    """Moves rows of arrays between the devices of one strategy."""

    def reduce(
        self,
        sources: Sequence[Row],
        destination: Row,
        weights: Sequence[float] | None = None,
        *,
        threads: int,
    ) -> None:
        """Put the sum over the replicas, in replica order, into one row.

        With weights it is Σ w_i·x_i. Runs on the calling thread with up to `threads` of the
        machine's. Raises ShapeError naming the replica whose row does not fit.
        """
        self.all_reduce(sources, [destination], weights, threads=threads)

    def all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None = None,
        *,
        threads: int,
    ) -> None:
        """Put the same sum into several rows, one on each device that wants it."""
        _check(sources, "all_reduce")
        self._sum(sources, destinations, weights, threads)

    @abstractmethod
    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
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
