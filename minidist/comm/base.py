"""Communicator: how buffers on several devices meet. It knows arrays and devices, not variables.

The public verbs check what they are given, so that a mistake is named before any byte moves; what
they do then is each subclass's own. A *row* is a list of arrays, and every replica gives a row with
the same shapes and dtypes. A Row (row.py) knows where its arrays are; any other list is on the
device of its number. Any number of threads may call the same communicator at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minidist import observe
from minidist.comm.row import Row, placed
from minidist.device import Array, Device
from minidist.errors import ShapeError, UsageError
from minidist.kernels.reduce import alike
from minidist.traffic import Outline, Places, Traffic


class Communicator(ABC):
    """Moves rows of arrays between the devices of one strategy.

    devices: those of the replicas, in their order.
    order: the class of orders in which it sums, "serial", "ring" or "tree"; "mixed" where that
        depends on the size of a tensor. Results are the same, bit for bit, within a class.
    """

    devices: tuple[Device, ...]
    order: str

    def reduce(
        self,
        sources: Sequence[Sequence[Array]],
        destination: Sequence[Array],
        weights: Sequence[float] | None = None,
        *,
        scale: float = 1.0,
        threads: int,
    ) -> None:
        """Put the sum over the replicas, in the algorithm's order, times `scale`, into one row.

        With weights it is Σ(w_i·x_i)·scale. Weights and scale are for floating-point rows. Runs on
        the calling thread with up to `threads` of the machine's.
        Raises ShapeError naming the replica or destination whose row does not fit.
        """
        self.all_reduce(sources, [destination], weights, scale=scale, threads=threads)

    def all_reduce(
        self,
        sources: Sequence[Sequence[Array]],
        destinations: Sequence[Sequence[Array]],
        weights: Sequence[float] | None = None,
        *,
        scale: float = 1.0,
        threads: int,
    ) -> None:
        """Put the same sum into several rows, one on each device that wants it.

        A destination's array may be the array of the same number in a source; it must not overlap
        a source or a destination in any other way.
        """
        if not destinations:
            raise UsageError("all_reduce has no destination; give a row for each device")
        if not alike((*sources, *destinations)):
            _check(sources, destinations)
        if weights is not None and len(weights) != len(sources):
            raise UsageError(f"all_reduce: {len(weights)} weights for {len(sources)} replicas")
        in_place = destinations is sources
        sources = placed(sources, self.devices)
        destinations = sources if in_place else placed(destinations, self.devices)
        if not observe.watching:
            self._all_reduce(sources, destinations, weights, scale, threads)
            return
        nbytes = sum(array.nbytes for array in sources[0])
        how = {"tensors": len(sources[0]), "bytes": nbytes, "destinations": len(destinations)}
        with observe.span("reduce", type(self).__name__, sources=len(sources), **how):
            self._all_reduce(sources, destinations, weights, scale, threads)

    @abstractmethod
    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """Do it, for rows that fit each other."""

    @abstractmethod
    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        """Return what `all_reduce` moves when all replicas bring rows of such tensors.

        destinations: for each, the device of each tensor.
        """


def _check(sources: Sequence[Sequence[Array]], destinations: Sequence[Sequence[Array]]) -> None:
    first = sources[0]
    kinds = [(array.shape, array.dtype) for array in first]
    for who, rows in (("replica", sources), ("destination", destinations)):
        for number, row in enumerate(rows):
            if row is first or [(array.shape, array.dtype) for array in row] == kinds:
                continue
            if len(row) != len(first):
                raise ShapeError(
                    f"all_reduce: replica 0 gives {len(first)} tensors and {who} {number} has "
                    f"{len(row)}; all must have the same"
                )
            for i, (ours, theirs) in enumerate(zip(first, row, strict=True)):
                if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                    raise ShapeError(
                        f"all_reduce: tensor {i} is {ours.dtype}{list(ours.shape)} in replica 0 "
                        f"and {theirs.dtype}{list(theirs.shape)} in {who} {number}"
                    )
