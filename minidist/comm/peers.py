"""Peers: the ranks that do something together, one after the other and all in the same order.

All collective work of several processes begins with `meet`: every rank says in words what it is
about to do, and brings a few bytes. If they say different things, or one of them has left, failed,
or does not come, it is an error that names the ranks; so a mistake is found before any data moves.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm.mpi import Engine, Pending
from minidist.errors import HangError, MergeMismatchError, PeerError
from minidist.patience import DEADLINE, REPORT_AFTER, Waiting

if TYPE_CHECKING:
    from minidist.device import Array

Patience = Callable[[], tuple[float, float]]  # seconds to a report, and to an error

KINDS = 8  # tags of one channel
PACKET, REST, DATA = range(1, 4)
HEAD = struct.Struct("<QII")  # number of the meeting, bytes of what is done, bytes that are brought
PACKET_BYTES = 1024


class Peers:
    """A group of ranks in which this one is number `me`.

    names: who they are, as "worker:0". hosts: on which machine each is. Alone, as this class is,
    a rank meets nobody.
    """

    me = 0
    names: tuple[str, ...] = ("worker:0",)
    hosts: tuple[str, ...] = ("",)

    @property
    def count(self) -> int:
        return len(self.names)

    def meet(self, what: str, brought: bytes = b"") -> list[bytes]:
        """Meet all the others, and return what each has brought, in the order of the ranks.

        what: what is about to be done, in words that must be the same in all ranks.
        Raises MergeMismatchError where they are not, PeerError where a rank has failed or left,
        HangError where one does not come.
        """
        return [brought]

    def send(self, to: int, array: Array) -> Pending:
        """Send a contiguous array to a peer; it may be written again when this is done."""
        raise AssertionError("there is nobody to send to")

    def receive(self, source: int, array: Array) -> Pending:
        """Receive into a contiguous array, in the order in which that peer has sent."""
        raise AssertionError("there is nobody to receive from")

    def wait(self, pendings: Sequence[tuple[int, Pending]], what: str) -> None:
        """Wait for messages, each with the peer that it comes from or goes to.

        Raises PeerError and HangError as `meet` does, and what has gone wrong with one of them.
        """

    def fail(self, failure: BaseException) -> None:
        """Tell the others that this rank has failed, so that they do not wait for it."""

    def leave(self) -> None:
        """Tell the others that this rank takes no further part."""


class Ranks(Peers):
    """Peers that are other processes, over one channel of messages."""

    def __init__(
        self,
        engine: Engine,
        channel: int,
        ranks: Sequence[int],
        names: Sequence[str],
        patience: Patience = lambda: (REPORT_AFTER, DEADLINE),
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._tag = channel * KINDS
        self._ranks = tuple(ranks)
        self.me = self._ranks.index(engine.rank)
        self.names = tuple(names)
        self.hosts = tuple(engine.hosts[rank] for rank in ranks)
        self.patience = patience
        self._met = 0  # meetings that this rank has come to
        self._ended: dict[int, tuple[int, str, bool]] = {}  # by peer: after which, why, failed
        self._read = 0  # notices that were looked at
        self._broken: BaseException | None = None
        self._gone = False

    def meet(self, what: str, brought: bytes = b"") -> list[bytes]:
        self._require_whole()
        self._met += 1
        said = what.encode()
        body = said + brought
        packet = np.zeros(PACKET_BYTES, np.uint8)
        head = HEAD.pack(self._met, len(said), len(brought)) + body
        packet[: len(head)] = np.frombuffer(head[:PACKET_BYTES], np.uint8)
        rest = np.frombuffer(head[PACKET_BYTES:], np.uint8)
        others = [peer for peer in range(self.count) if peer != self.me]
        packets = {peer: np.empty(PACKET_BYTES, np.uint8) for peer in others}
        arriving = [(peer, self._receive(peer, packets[peer], PACKET)) for peer in others]
        leaving = [(peer, self._send(peer, packet, PACKET)) for peer in others]
        if len(rest):
            leaving += [(peer, self._send(peer, rest, REST)) for peer in others]
        self.wait(arriving, what)
        theirs = {peer: self._opened(peer, packets[peer], what) for peer in others}
        self.wait(leaving, what)
        theirs[self.me] = (self._met, what, brought)
        self._check_same([theirs[peer][:2] for peer in range(self.count)])
        return [theirs[peer][2] for peer in range(self.count)]

    def _opened(self, peer: int, packet: Any, what: str) -> tuple[int, str, bytes]:
        """Return the number, the words and the bytes of a packet; the rest comes by itself."""
        head = packet.tobytes()
        number, words, length = HEAD.unpack_from(head)
        missing = HEAD.size + words + length - PACKET_BYTES
        if missing > 0:
            rest = np.empty(missing, np.uint8)
            self.wait([(peer, self._receive(peer, rest, REST))], what)
            head += rest.tobytes()
        body = head[HEAD.size : HEAD.size + words + length]
        return number, body[:words].decode(), body[words:]

    def _check_same(self, said: Sequence[tuple[int, str]]) -> None:
        if all(each == said[0] for each in said):
            return
        by_what: dict[str, list[str]] = {}
        for name, (_, what) in zip(self.names, said, strict=True):
            by_what.setdefault(what, []).append(name)
        if len(by_what) == 1:
            numbers = [number for number, _ in said]
            lines = [f"{name}: {n}" for name, n in zip(self.names, numbers, strict=True)]
        else:
            lines = [f"{', '.join(names)}: {what}" for what, names in by_what.items()]
        self._broken = MergeMismatchError(
            "the ranks do different things; all must do the same in the same order. In their "
            f"meeting {self._met}, " + "; ".join(lines)
        )
        raise self._broken

    def send(self, to: int, array: Array) -> Pending:
        return self._send(to, array, DATA)

    def receive(self, source: int, array: Array) -> Pending:
        return self._receive(source, array, DATA)

    def _send(self, to: int, array: Array, kind: int) -> Pending:
        return self._engine.send(self._ranks[to], self._tag + kind, array)

    def _receive(self, source: int, array: Array, kind: int) -> Pending:
        return self._engine.receive(self._ranks[source], self._tag + kind, array)

    def wait(self, pendings: Sequence[tuple[int, Pending]], what: str) -> None:
        waiting: Waiting | None = None
        for peer, pending in pendings:
            while not pending.fence.wait(1, 0.0):
                self._check_ended(peer, what)
                if waiting is None:
                    waiting = Waiting(*self.patience())
                try:
                    waiting.tick(pending.fence, 1, lambda: self._missing(pendings, what))
                except HangError as failure:
                    self._broken = failure
                    raise
            pending.get()

    def _missing(self, pendings: Sequence[tuple[int, Pending]], what: str) -> str:
        late = sorted({peer for peer, pending in pendings if not pending.done})
        names = ", ".join(f"{self.names[peer]} (on {self.hosts[peer]})" for peer in late)
        return f"{self.names[self.me]} has waited for {names} to {what}, in meeting {self._met}"

    # --- the end

    def fail(self, failure: BaseException) -> None:
        if self._broken is None:
            self._broken = failure
            self._tell(f"{type(failure).__name__}: {failure}", failed=True)

    def leave(self) -> None:
        if not self._gone and self._broken is None:
            self._gone = True
            self._tell("", failed=False)

    def _tell(self, why: str, failed: bool) -> None:
        why = why.encode("ascii", "replace").decode()[:900]  # fits a notice, whatever JSON escapes
        notice = {"channel": self._channel, "met": self._met, "failed": failed, "why": why}
        for peer, rank in enumerate(self._ranks):
            if peer != self.me:
                self._engine.notify(rank, json.dumps(notice).encode())

    def _read_notices(self) -> None:
        notices = self._engine.notices
        while self._read < len(notices):
            rank, text = notices[self._read]
            self._read += 1
            notice = json.loads(text)
            if notice["channel"] == self._channel and rank in self._ranks:
                peer = self._ranks.index(rank)
                self._ended.setdefault(peer, (notice["met"], notice["why"], notice["failed"]))

    def _check_ended(self, waited_for: int, what: str) -> None:
        """Raise PeerError where a peer has failed, or the one that is waited for will not come."""
        self._read_notices()
        for peer, (met, why, failed) in self._ended.items():
            if failed:
                self._broken = PeerError(
                    f"{self.names[peer]} (on {self.hosts[peer]}) has failed after {met} meetings, "
                    f"while {self.names[self.me]} was to {what}, in meeting {self._met}: {why}"
                )
                raise self._broken
            if peer == waited_for and met < self._met:
                self._broken = PeerError(
                    f"{self.names[peer]} (on {self.hosts[peer]}) has ended after {met} meetings, "
                    f"and {self.names[self.me]} wants to {what} in meeting {self._met}; all ranks "
                    "must take the same number of steps"
                )
                raise self._broken

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise PeerError(
                f"{self.names[self.me]} and its peers are out of step since: "
                f"{type(self._broken).__name__}: {self._broken}; make a new strategy"
            ) from self._broken
        self._check_ended(-1, "go on")


def never() -> tuple[float, float]:
    """The patience of who waits for ever, and says nothing."""
    return math.inf, math.inf
