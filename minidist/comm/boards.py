"""Boards: a carrier in memory, for members on one machine. Everybody reads what the others write.

    member 0's board   │ fence: 7 │ area 0: 0→1 0→2 │ area 1: 0→1 0→2 │
    member 1's board   │ fence: 7 │ area 0: 1→0 1→2 │ area 1: 1→0 1→2 │
    member 2's board   │ fence: 6 │ area 0: 2→0 2→1 │ area 1: 2→0 2→1 │

A fence counts the rounds that its member has handed over, here 7 and 6; member 2 is writing what is
for round 6 into area 0. Nobody begins a round before all have handed over the one before; and who
has done that reads nothing any more of what came before it. So two areas are enough.
No call to MPI, no system call, and what a round carries stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minidist import observe
from minidist.comm.carrier import ROOM, Carrier, Round
from minidist.comm.letters import Letters
from minidist.comm.mpi import SPIN
from minidist.comm.peers import Ranks
from minidist.comm.window import LINE
from minidist.device import Array
from minidist.kernels.rendezvous import SharedFence
from minidist.traffic import Traffic


class Boards(Carrier):
    """Members that share memory. boards: those of all members, in their order."""

    def __init__(self, peers: Ranks, members: Sequence[int], boards: Sequence[Array]) -> None:
        self.members = tuple(members)
        self.me = self.members.index(peers.me)
        self.area = ROOM * len(members)
        self.fields: list[Sequence[Array]] = []  # plots for rows, of each member; see fields.py
        self.peers = peers
        self.boards = boards
        self.fences = [SharedFence(board[:LINE], SPIN) for board in boards]
        self._others = [
            (peer, self.fences[member])
            for member, peer in enumerate(self.members)
            if member != self.me
        ]
        self._rounds = 0

    @contextmanager
    def round(
        self, out: int | Sequence[int], into: Sequence[int], dtype: Any, what: str
    ) -> Iterator[Round]:
        self.peers.wait_for(self._others, self._rounds, what)
        self._rounds += 1
        yield _Turn(self, self._rounds, out, into, dtype, what)

    def step(self, what: str) -> None:
        """Wait until all members have come here."""
        self.peers.wait_for(self._others, self._rounds, what)
        self._rounds += 1
        self.fences[self.me].advance()
        self.peers.wait_for(self._others, self._rounds, what)

    def predicted_bytes(self, out: int | Sequence[int], into: Sequence[int], dtype: Any) -> Traffic:
        """It reads, and who reads is counted."""
        traffic, names = Traffic(), [self.peers.names[peer] for peer in self.members]
        for member, name in enumerate(names):
            if member != self.me and into[member]:
                traffic[f"{name}->{names[self.me]}"] += into[member] * dtype.itemsize
        return traffic


class _Turn(Round):
    """One round on the boards."""

    def __init__(
        self,
        carrier: Boards,
        number: int,
        out: int | Sequence[int],
        into: Sequence[int],
        dtype: Any,
        what: str,
    ) -> None:
        self._carrier, self._number = carrier, number
        self._out, self._into, self._dtype, self._what = out, into, dtype, what

    def desk(self, to: int) -> Array:
        length = self._out if isinstance(self._out, int) else self._out[to]
        return self._at(self._carrier.me, to, length)

    def hand_over(self) -> None:
        self._carrier.fences[self._carrier.me].advance()

    def take(self, source: int) -> Array:
        carrier, length = self._carrier, self._into[source]
        peer = carrier.members[source]
        carrier.peers.wait_for([(peer, carrier.fences[source])], self._number, self._what)
        array = self._at(source, carrier.me, length)
        if observe.counting:
            peers = carrier.peers
            observe.moved(peers.names[peer], peers.names[peers.me], array.nbytes, "network")
        return array

    def _at(self, member: int, to: int, length: int) -> Array:
        """Return where a member writes what is for another one, or for all."""
        start = LINE + self._number % 2 * self._carrier.area
        if not isinstance(self._out, int):
            start += to * ROOM
        end = start + length * self._dtype.itemsize
        return self._carrier.boards[member][start:end].view(self._dtype)


def carrier(peers: Ranks, members: Sequence[int]) -> Carrier:
    """Return what joins some members of a group: boards where they share memory, else letters.

    All peers must ask, each for those that it is among; the same is returned whenever they ask.
    """
    members = tuple(members)
    if members not in peers.carriers:
        nbytes = LINE + 2 * ROOM * len(members)
        starts = peers.take_plots("share memory", nbytes)
        if all(starts[member] >= 0 and peers.plots.reaches(member) for member in members):
            plots = [peers.plots.at(member, starts[member], nbytes) for member in members]
            peers.carriers[members] = Boards(peers, members, plots)
        else:
            peers.carriers[members] = Letters(peers, members)
    return peers.carriers[members]
