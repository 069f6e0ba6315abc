"""Between: how machines bring together what each has, one block of elements after the other.

A block is begun with the rows of this machine's replicas, in their order, and later finished with
the sum over all machines. In between further blocks may begin, so that while some are on their way
the next is being added up:

    begin(0)  begin(1)  begin(2)  finish(0)  begin(3)  finish(1)  …          lag = 2

chain.py, doubling.py, gathered.py and collective.py are ways to do it; Alone is that of a machine
that has no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from minidist.comm.carrier import ROOM
from minidist.comm.cutting import Piece, extent, lengths
from minidist.comm.orders import accumulator, add
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch, in_a_row
from minidist.device import Array, host
from minidist.traffic import Outline, Traffic


class Share(NamedTuple):
    """What a machine brings to a block, and what there is to know of it.

    rows: in the order of the replicas; none where they have no say. saying: the machines that bring
    any. like: a row of the kind. at, sizes: of which tensors of which sizes the arrays are pieces.
    number, first: that of the block, and with which of the saying machines its sum begins. into:
    where the sum is wanted, if that is known yet.
    """

    rows: Sequence[Row]
    weights: Sequence[float] | None
    saying: Sequence[int]
    like: Row
    at: Sequence[Piece]
    sizes: Sequence[int]
    number: int
    first: int
    scale: float
    threads: int
    into: Sequence[Row] | None

    def add_up(self, into: Row, order: str) -> None:
        """Put the sum of this machine's rows into a row, which may be the accumulator's dtype."""
        rows, weights, threads = self.rows, self.weights, self.threads
        add(order, [into], rows, weights, at=self.at, sizes=self.sizes, threads=threads)

    def row(self, flat: Array) -> Row:
        """Return the block's arrays as they lie in one buffer, one directly behind the other."""
        return in_a_row(flat, lengths(self.like))

    def own_sum(self, scratch: Scratch, order: str) -> Array:
        """Return the sum of this machine's rows in one buffer of the accumulator's dtype."""
        flat = scratch.flat(host(), extent(self.at), accumulator(self.like[0].dtype))
        if self.rows:
            self.add_up(self.row(flat), order)
        return flat


class Flight(ABC):
    """A block on its way."""

    @abstractmethod
    def finish(self, into: Sequence[Row]) -> None:
        """Put the sum over all machines, times the scale, into some rows."""


class Between(ABC):
    """A way to sum over machines. order: in which, and of what; see Communicator.order.

    lag: how many blocks are begun before the first is finished; where it is not 0, the rows of a
    block are not read any more once it has begun. room: bytes of a block.
    """

    order: str
    lag = 0
    room = ROOM

    @abstractmethod
    def begin(self, share: Share) -> Flight:
        """Send what there is to send of a block."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until everything that was sent has left."""

    @abstractmethod
    def predicted_bytes(self, block: Outline, number: int, first: int) -> Traffic:
        """Return what this rank sends for a block when all machines bring something."""


class Alone(Between):
    """One machine: the sum of its rows is the whole one. order: "serial", "ring" or "tree"."""

    def __init__(self, order: str) -> None:
        self.order = order

    def begin(self, share: Share) -> Flight:
        return _Here(share, self.order)

    def settle(self) -> None:
        """Nothing was sent."""

    def predicted_bytes(self, block: Outline, number: int, first: int) -> Traffic:
        return Traffic()


class _Here(Flight):
    def __init__(self, share: Share, order: str) -> None:
        self._share, self._order = share, order

    def finish(self, into: Sequence[Row]) -> None:
        share = self._share
        add(
            self._order,
            into,
            share.rows,
            share.weights,
            share.scale,
            at=share.at,
            sizes=share.sizes,
            threads=share.threads,
        )
