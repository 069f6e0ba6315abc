"""Letters: a carrier by messages, for members that share no memory.

desk(1)  ── hand_over: send ──►  take(0): a receive, under way since the round has begun
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minidist import observe
from minidist.comm.carrier import Carrier, Round
from minidist.comm.mpi import Pending
from minidist.comm.peers import Ranks
from minidist.comm.scratch import Scratch
from minidist.device import Array, host
from minidist.traffic import Traffic


class Letters(Carrier):
    """Members that send each other messages."""

    def __init__(self, peers: Ranks, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.me = self.members.index(peers.me)
        self.peers = peers

    @contextmanager
    def round(
        self, out: int | Sequence[int], into: Sequence[int], dtype: Any, what: str
    ) -> Iterator[Round]:
        scratch = Scratch()  # what fails leaves its buffers to MPI, so this is no with statement
        arriving = {
            member: scratch.flat(host(), length, dtype)
            for member, length in enumerate(into)
            if member != self.me
        }
        if isinstance(out, int):
            desks = [scratch.flat(host(), out, dtype)] * len(self.members)
        else:
            desks = [scratch.flat(host(), length, dtype) for length in out]
        sheaf = _Sheaf(self, desks, arriving, what)
        yield sheaf
        self.peers.wait(sheaf.leaving, what)
        scratch.close()

    def predicted_bytes(self, out: int | Sequence[int], into: Sequence[int], dtype: Any) -> Traffic:
        """It sends, and who sends is counted."""
        traffic, names = Traffic(), [self.peers.names[peer] for peer in self.members]
        for member, name in enumerate(names):
            length = out if isinstance(out, int) else out[member]
            if member != self.me and length:
                traffic[f"{names[self.me]}->{name}"] += length * dtype.itemsize
        return traffic


class _Sheaf(Round):
    """The messages of one round."""

    def __init__(
        self, carrier: Letters, desks: Sequence[Array], arriving: dict[int, Array], what: str
    ) -> None:
        self._carrier, self._desks, self._arriving, self._what = carrier, desks, arriving, what
        peers, members = carrier.peers, carrier.members
        self._pending: dict[int, Pending] = {
            member: peers.receive(members[member], array)
            for member, array in arriving.items()
            if len(array)
        }
        self.leaving: list[tuple[int, Pending]] = []

    def desk(self, to: int) -> Array:
        return self._desks[to]

    def hand_over(self) -> None:
        carrier = self._carrier
        peers = carrier.peers
        for member, array in enumerate(self._desks):
            if member != carrier.me and len(array):
                peer = carrier.members[member]
                if observe.counting:
                    observe.moved(peers.names[peers.me], peers.names[peer], array.nbytes, "network")
                self.leaving.append((peer, peers.send(peer, array)))

    def take(self, source: int) -> Array:
        if source in self._pending:
            peer = self._carrier.members[source]
            self._carrier.peers.wait([(peer, self._pending[source])], self._what)
        return self._arriving[source]
