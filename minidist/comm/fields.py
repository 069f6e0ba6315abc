"""Fields: rows in the window itself, so that who sums reads and writes those of all ranks.

    rank 0's row   │ A0 │ B0 │        │ A ◄── A0 + A1 ──┐ │ B ◄──────────────┐ │
    rank 1's row   │ A1 │ B1 │        │ A ◄─────────────┘ │ B ◄── B0 + B1 ───┘ │

Nothing is copied to a board and back: rank 0 adds up all ranks' share A and stores the sum in all
ranks' rows, rank 1 does so for B. What is not there yet is copied to where its sum is wanted first,
of the others' shares. Two steps are all that the ranks wait for each other.

It takes a row for one destination in each rank, made with `make`, and one replica in each.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from minidist import observe
from minidist.comm.boards import Boards
from minidist.comm.cutting import Plan, cut, lengths
from minidist.comm.flat import Kind, places, room
from minidist.comm.orders import add, store
from minidist.comm.row import Row
from minidist.device import Array, Device, host


class Spot(NamedTuple):
    """Where a row lies: in which field, and from which bytes on each of its arrays."""

    field: int
    starts: tuple[int, ...]

    @property
    def stamp(self) -> bytes:
        """What tells this spot from others, in a few bytes."""
        return struct.pack("<II", self.field, zlib.crc32(repr(self.starts).encode()))

    def part(self, members: Sequence[int]) -> Spot:
        """Return that of only some of the arrays."""
        return Spot(self.field, tuple(self.starts[i] for i in members))


class Fields:
    """Rows in the window, of the members that boards join."""

    def __init__(self, boards: Boards) -> None:
        self._boards = boards
        self._known: dict[Spot, tuple[tuple[Kind, ...], Plan, list[list[Row]]]] = {}

    def make(self, device: Device, kinds: Sequence[Kind]) -> Row | None:
        """Return a row of arrays in the window; None where there is no room in one of the ranks.

        All members must ask for the same. It is valid until they have left.
        """
        boards, nbytes = self._boards, room(kinds)
        peers = boards.peers
        starts = peers.take_plots(f"make a row of {kinds} in the window", nbytes)
        if min(starts) < 0:
            return None
        plots = [
            peers.plots.at(peer, start, nbytes)
            for peer, start in zip(boards.members, starts, strict=True)
        ]
        boards.fields.append(plots)
        return Row.on(device, places(plots[boards.me], 0, kinds))

    def find(self, row: Row) -> Spot | None:
        """Return where a row is, None for one that is not, or not wholly, in one field."""
        addresses = [array.ctypes.data for array in row]
        for number, plots in enumerate(self._boards.fields):
            own = plots[self._boards.me]
            first = own.ctypes.data
            if all(
                first <= address <= first + len(own) - array.nbytes and array.flags.c_contiguous
                for address, array in zip(addresses, row, strict=True)
            ):
                return Spot(number, tuple(address - first for address in addresses))
        return None

    def sum(
        self,
        spot: Spot,
        source: Row,
        weights: Sequence[float] | None,
        plan: Plan,
        order: str,
        scale: float,
        threads: int,
    ) -> None:
        """Put the sum of all members' sources, times weights and scale, into the rows at a spot.

        plan: the shares.
        """
        boards, me = self._boards, self._boards.me
        rows = self._cut(spot, tuple([Kind.of(array) for array in source]), plan)
        own = rows[me]
        if self.find(source) != spot:
            own = cut(source, plan)
            for member, part in enumerate(own):
                if member != me and part:
                    store([rows[me][member]], part, threads)
        boards.step("sum")
        if plan[me]:
            parts = [own[me] if member == me else row[me] for member, row in enumerate(rows)]
            into, at, sizes = [row[me] for row in rows], plan[me], lengths(source)
            add(order, into, parts, weights, scale, at=at, sizes=sizes, threads=threads)
        boards.step("sum")
        if observe.counting:
            self._tell(own)

    def _cut(self, spot: Spot, kinds: tuple[Kind, ...], plan: Plan) -> list[list[Row]]:
        """Return every member's row at a spot, cut by a plan; the same whenever asked again."""
        known = self._known.get(spot)
        if known is None or known[:2] != (kinds, plan):
            plots = self._boards.fields[spot.field]
            rows = [cut(self._row(plot, spot, kinds), plan) for plot in plots]
            known = self._known[spot] = kinds, plan, rows
        return known[2]

    def _row(self, plot: Array, spot: Spot, kinds: Sequence[Kind]) -> Row:
        each = zip(spot.starts, kinds, strict=True)
        return Row.on(host(), [places(plot, start, [kind])[0] for start, kind in each])

    def _tell(self, own: Sequence[Row]) -> None:
        """Tell what this rank gets: the others' rows of its share, and the sums of theirs."""
        boards = self._boards
        names = [boards.peers.names[peer] for peer in boards.members]
        share = sum(array.nbytes for array in own[boards.me])
        for member, part in enumerate(own):
            if member != boards.me:
                nbytes = share + sum(array.nbytes for array in part)
                observe.moved(names[member], names[boards.me], nbytes, "network")
