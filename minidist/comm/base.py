"""Communicator: how buffers on several devices meet. It knows arrays and devices, not variables.

The public verbs check what they are given, so that a mistake is named before any byte moves; what
they do then is each subclass's own. A *row* is a list of arrays, and every replica gives a row with
the same shapes and dtypes. A Row (row.py) knows where its arrays are; any other list is on the
device of its number. Any number of threads may call the same communicator at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from minidist import observe
from minidist.comm.cutting import Plan, cut, lengths, shares
from minidist.comm.packing import allocate_row
from minidist.comm.peers import Peers
from minidist.comm.row import Row, placed, tell
from minidist.comm.scratch import Scratch
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
    _peers: Peers = Peers()  # the processes that take part: this one alone

    def reduce(
        self,
        sources: Sequence[Sequence[Array]],
        destination: Sequence[Array] | None,
        weights: Sequence[float] | None = None,
        *,
        root: int | None = None,
        scale: float = 1.0,
        threads: int,
    ) -> None:
        """Put the sum over the replicas, in the algorithm's order, times `scale`, into one row.

        With weights it is Σ(w_i·x_i)·scale. Weights and scale are for floating-point rows. Runs on
        the calling thread with up to `threads` of the machine's.
        root: the replica in whose process it is wanted; other processes may give None for it. By
        default every process wants it.
        Raises ShapeError naming the replica or destination whose row does not fit.
        """
        here = root is None or self.first <= root < self.first + len(self.devices)
        if root is not None:
            self._check_replica("reduce", root)
            self._agree(f"reduce to replica {root}")
        if destination is None and here:
            raise UsageError("reduce: the sum is wanted in this process; give a destination for it")
        wanted = [] if destination is None else [destination]
        if root is None:
            self.all_reduce(sources, wanted, weights, scale=scale, threads=threads)
        else:
            fit("reduce", sources, wanted)
            home = self.devices[root - self.first if here else 0]
            given, heard = self._heard(placed(sources, self.devices), weights)
            to = placed(wanted, [home])
            with self._told(given, to):
                self._reduce_to(root, given, to, heard, scale, threads)

    def reduce_scatter(
        self,
        sources: Sequence[Sequence[Array]],
        destinations: Sequence[Sequence[Array]],
        weights: Sequence[float] | None = None,
        *,
        scale: float = 1.0,
        threads: int,
    ) -> None:
        """Give each replica its part of the sum, which is all-reduced.

        destinations: for each replica here a row of flat arrays. Of a tensor of L elements replica
        k of n gets those from ⌊kL/n⌋ to ⌊(k+1)L/n⌋.
        """
        n = self.replicas
        given = placed(sources, self.devices)
        wanted = placed(destinations, self.devices)
        plan = shares(lengths(given[0]), n)
        if len(wanted) != len(self.devices):
            raise UsageError(
                f"reduce_scatter: {len(wanted)} destinations for {len(self.devices)} replicas"
            )
        for k, row in enumerate(wanted, self.first):
            sizes = [b - a for _, a, b in plan[k]]
            if [array.size for array in row] != sizes:
                raise ShapeError(
                    f"reduce_scatter: replica {k} of {n} gets {sizes} elements of the tensors, and "
                    f"its destination has room for {[array.size for array in row]}"
                )
        self._sum_shares(given, wanted, plan, weights, scale, threads)

    def allocate(self, kinds: Sequence[tuple[tuple[int, ...], Any]]) -> Row:
        """Return a row of arrays, each (shape, dtype), in which a sum is had the fastest.

        All processes must ask for the same. Of ranks that share memory each has its row where the
        others reach it. It is valid as long as they are in step.
        """
        return allocate_row([(self.devices[0], kind) for kind in kinds])

    def broadcast(self, rows: Sequence[Sequence[Array]], root: int = 0) -> None:
        """Copy the row of replica `root` into those of all others; dtypes may be any.

        Raises UsageError for a replica that there is not, ShapeError as all_reduce does.
        """
        fit("broadcast", rows, [])
        self._check_replica("broadcast", root)
        with observe.span("copy", "broadcast", tensors=len(rows[0])):
            self._broadcast_rows(placed(rows, self.devices), root)

    def all_gather(self, sources: Sequence[Sequence[Array]]) -> list[Row]:
        """Return the rows of all replicas, in their order; numbers, shapes and dtypes may differ.

        Those of this process are the sources themselves, others are new, on the first device here.
        """
        with observe.span("copy", "all_gather"):
            return self._gather_rows(placed(sources, self.devices))

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
        fit("all_reduce", sources, destinations)
        in_place = destinations is sources
        sources = placed(sources, self.devices)
        destinations = sources if in_place else placed(destinations, self.devices)
        sources, weights = self._heard(sources, weights)
        with self._told(sources, destinations):
            self._all_reduce(sources, destinations, weights, scale, threads)

    def close(self) -> None:  # noqa: B027, most hold nothing else
        """Give back what is held beside memory; closing twice is fine."""

    @property
    def replicas(self) -> int:
        """How many replicas there are, with those of other processes."""
        return len(self.devices)

    @property
    def first(self) -> int:
        """The number of this process's first replica."""
        return 0

    def _told(
        self, sources: Sequence[Row], destinations: Sequence[Row]
    ) -> AbstractContextManager[None]:
        """Return a with statement's way to tell of a sum."""
        if not observe.watching:
            return observe.nothing
        nbytes = sum(array.nbytes for array in sources[0])
        how = {"tensors": len(sources[0]), "bytes": nbytes, "destinations": len(destinations)}
        return observe.span("reduce", type(self).__name__, sources=len(sources), **how)

    def _check_replica(self, verb: str, replica: int) -> None:
        if not 0 <= replica < self.replicas:
            raise UsageError(f"{verb}: there is no replica {replica} of {self.replicas}")

    def _agree(self, what: str) -> None:
        """Meet the other processes, if there are any, all of which must be about to do that."""
        self._peers.meet(what)

    def _reduce_to(
        self,
        root: int,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """Put the sum into the destination, which there is none of where it is not wanted."""
        with Scratch() as scratch:
            wanted = destinations or [scratch.like(self.devices[0], sources[0])]
            self._all_reduce(sources, wanted, weights, scale, threads)

    def _sum_shares(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        plan: Plan,
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """Put the plan's share of the sum into the destination of each replica here."""
        with Scratch() as scratch:
            total = scratch.like(self.devices[0], sources[0])
            self.all_reduce(sources, [total], weights, scale=scale, threads=threads)
            for k, row in enumerate(destinations, self.first):
                copy_row(row, cut(total, plan)[k])

    def _broadcast_rows(self, rows: Sequence[Row], root: int) -> None:
        for row in rows:
            if row is not rows[root]:
                copy_row(row, rows[root])

    def _gather_rows(self, sources: Sequence[Row]) -> list[Row]:
        return list(sources)

    def _heard(
        self, sources: Sequence[Row], weights: Sequence[float] | None
    ) -> tuple[Sequence[Row], Sequence[float] | None]:
        """Return what is summed: replicas of weight 0 have no say, not even with a NaN."""
        if weights is None:
            return sources, None
        if len(weights) != len(sources):
            raise UsageError(f"all_reduce: {len(weights)} weights for {len(sources)} replicas")
        if all(weights):
            return sources, weights
        return (
            [row for row, weight in zip(sources, weights, strict=True) if weight],
            [weight for weight in weights if weight],
        )

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


def copy_row(destination: Row, source: Row) -> None:
    """Let the devices of a row read another one."""
    if observe.counting:
        tell(destination.devices, [destination], [source])
    for device, into, array in zip(destination.devices, destination, source, strict=True):
        device.copy(into, array)


def fit(
    verb: str, sources: Sequence[Sequence[Array]], destinations: Sequence[Sequence[Array]]
) -> None:
    """Raise ShapeError naming the first row that is not like that of replica 0."""
    if alike((*sources, *destinations)):
        return
    first = sources[0]
    kinds = [(array.shape, array.dtype) for array in first]
    for who, rows in (("replica", sources), ("destination", destinations)):
        for number, row in enumerate(rows):
            if row is first or [(array.shape, array.dtype) for array in row] == kinds:
                continue
            if len(row) != len(first):
                raise ShapeError(
                    f"{verb}: replica 0 gives {len(first)} tensors and {who} {number} has "
                    f"{len(row)}; all must have the same"
                )
            for i, (ours, theirs) in enumerate(zip(first, row, strict=True)):
                if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                    raise ShapeError(
                        f"{verb}: tensor {i} is {ours.dtype}{list(ours.shape)} in replica 0 "
                        f"and {theirs.dtype}{list(theirs.shape)} in {who} {number}"
                    )
