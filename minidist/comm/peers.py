"""Peers: the ranks that do something together, one after the other and all in the same order.

All collective work of several processes begins with `meet`: every rank says in words what it is
about to do, and brings a few bytes. If they say different things, or one of them has left, failed,
or does not come, it is an error that names the ranks; so a mistake is found before any data moves.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from minidist import context, observe
from minidist.comm.mail import BOX, PLOT, Mail
from minidist.comm.mpi import Engine, Pending
from minidist.comm.window import Plots
from minidist.errors import HangError, MergeMismatchError, PeerError
from minidist.kernels.rendezvous import Fence, SharedFence
from minidist.patience import DEADLINE, REPORT_AFTER, Waiting

if TYPE_CHECKING:
    from minidist.comm.carrier import Carrier
    from minidist.device import Array

Patience = Callable[[], tuple[float, float]]  # seconds to a report, and to an error
AnyFence = Fence | SharedFence
Opened = tuple[int, bytes, bytes, int]  # a packet: number, what is done, what is brought, plot

EVERY = -1  # the channel of who ends: all that there are, also those that it has never used
KINDS = 8  # tags of one channel
PACKET, REST, DATA = range(1, 4)
# Number of the meeting, bytes of what is done, bytes that are brought, where the plot of mail is.
HEAD = struct.Struct("<QIIq")
START = struct.Struct("<q")  # where a plot begins
PACKET_BYTES = 1024
NOTHING: Opened = (0, b"", b"", -1)
SOON = 1e-3  # seconds that a wait may take before anybody looks whether it is in vain


class Peers:
    """A group of ranks in which this one is number `me`.

    names: who they are, as "worker:0". hosts: on which machine each is. Alone, as this class is,
    a rank meets nobody.
    """

    me = 0
    names: tuple[str, ...] = ("worker:0",)
    hosts: tuple[str, ...] = ("",)
    patience: Patience = staticmethod(lambda: (REPORT_AFTER, DEADLINE))
    waits: Callable[[], str] | None = None  # says for whom this rank waits, as long as it does

    def __init__(self, patience: Patience | None = None) -> None:
        if patience is not None:
            self.patience = patience

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

    def send(self, to: int, array: Array, kind: int = 0) -> Pending:
        """Send a contiguous array to a peer; it may be written again when this is done.

        kind: 0 or 1; messages of one kind arrive in the order in which they were sent.
        """
        raise AssertionError("there is nobody to send to")

    def receive(self, source: int, array: Array, kind: int = 0) -> Pending:
        """Receive into a contiguous array, in the order in which that peer has sent."""
        raise AssertionError("there is nobody to receive from")

    def wait(self, pendings: Sequence[tuple[int, Pending]], what: str) -> None:
        """Wait for messages, each with the peer that it comes from or goes to.

        Raises PeerError and HangError as `meet` does, and what has gone wrong with one of them.
        """

    def check(self, what: str) -> None:
        """Raise PeerError where a peer has failed, while this rank is to do something else."""

    @property
    def whole(self) -> bool:
        """Whether, as far as is known here, neither this rank nor another one has failed."""
        return True

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
        patience: Patience | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        """hosts: the machine of each rank, if it is to be taken for another one than it is on."""
        super().__init__(patience)
        self._engine = engine
        self._channel = channel
        self._tag = channel * KINDS
        self._ranks = tuple(ranks)
        self.me = self._ranks.index(engine.rank)
        self.names = tuple(names)
        self.hosts = tuple(hosts or [engine.hosts[rank] for rank in ranks])
        self._met = 0  # meetings that this rank has come to
        self._ended: dict[int, tuple[int, str, bool]] = {}  # by peer: after which, why, failed
        self._read = 0  # notices that were looked at
        self._reading = threading.Lock()
        self._broken: BaseException | None = None
        self._gone = False
        self.carriers: dict[tuple[int, ...], Carrier] = {}  # by their members; see boards.py
        self._others = [peer for peer in range(self.count) if peer != self.me]
        here = [host == self.hosts[self.me] for host in self.hosts]
        memory = [engine.memory.get(rank) for rank in self._ranks]
        self.plots = Plots(
            engine.part, [at if near else None for at, near in zip(memory, here, strict=True)]
        )
        self._mail: Mail | None = None  # from the second meeting on, where all share memory
        self._plot = self.plots.take(PLOT) if all(here) else -1

    def meet(self, what: str, brought: bytes = b"") -> list[bytes]:
        self._require_whole()
        self._met += 1
        said = what.encode()
        head = HEAD.pack(self._met, len(said), len(brought), self._plot)
        by = self._meet_by_messages if self._mail is None else self._meet_by_mail
        with observe.span("peers", what):
            opened = by(head + said + brought, what)
        opened[self.me] = (self._met, said, brought, self._plot)
        if any(number != self._met or words != said for number, words, _, _ in opened):
            self._raise_differing([(number, words.decode()) for number, words, _, _ in opened])
        if self._met == 1 and all(start >= 0 for _, _, _, start in opened):
            plots = [self.plots.at(peer, opened[peer][3], PLOT) for peer in range(self.count)]
            self._mail = Mail(plots, self.me)
        return [theirs for _, _, theirs, _ in opened]

    def take_plots(self, what: str, nbytes: int) -> list[int]:
        """Let every rank take a plot; return where each has its own, -1 where there is no room.

        Raises as `meet` does.
        """
        brought = self.meet(what, START.pack(self.plots.take(nbytes)))
        return [START.unpack(each)[0] for each in brought]

    def _meet_by_messages(self, packet: bytes, what: str) -> list[Opened]:
        sheet = np.zeros(PACKET_BYTES, np.uint8)
        sheet[: len(packet)] = np.frombuffer(packet[:PACKET_BYTES], np.uint8)
        sheets = {peer: np.empty(PACKET_BYTES, np.uint8) for peer in self._others}
        arriving = [(peer, self._receive(peer, sheets[peer], PACKET)) for peer in self._others]
        leaving = [(peer, self._send(peer, sheet, PACKET)) for peer in self._others]
        leaving += self._send_rest(packet[PACKET_BYTES:])
        self.wait(arriving, what)
        opened = [NOTHING] * self.count
        for peer in self._others:
            opened[peer] = self._opened(peer, sheets[peer].data, what)
        self.wait(leaving, what)
        return opened

    def _meet_by_mail(self, packet: bytes, what: str) -> list[Opened]:
        mail = self._mail
        assert mail is not None
        mail.put(packet[:BOX])
        leaving = self._send_rest(packet[BOX:])
        opened = [NOTHING] * self.count
        for peer in self._others:
            self.wait_for([(peer, mail.fences[peer])], mail.count, what)
            opened[peer] = self._opened(peer, mail.read(peer), what)
        self.wait(leaving, what)
        return opened

    def _send_rest(self, rest: bytes) -> list[tuple[int, Pending]]:
        """Send what is too long for a packet."""
        array = np.frombuffer(rest, np.uint8)
        return [(peer, self._send(peer, array, REST)) for peer in self._others] if rest else []

    def _opened(self, peer: int, packet: memoryview, what: str) -> Opened:
        """Return what is in a packet; the rest comes by itself."""
        number, words, length, plot = HEAD.unpack_from(packet)
        middle, end = HEAD.size + words, HEAD.size + words + length
        whole: Any = packet
        if end > len(packet):
            rest = np.empty(end - len(packet), np.uint8)
            self.wait([(peer, self._receive(peer, rest, REST))], what)
            whole = bytes(packet) + rest.tobytes()
        return number, bytes(whole[HEAD.size : middle]), bytes(whole[middle:end]), plot

    def _raise_differing(self, said: Sequence[tuple[int, str]]) -> NoReturn:
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

    def send(self, to: int, array: Array, kind: int = 0) -> Pending:
        return self._send(to, array, DATA + kind)

    def receive(self, source: int, array: Array, kind: int = 0) -> Pending:
        return self._receive(source, array, DATA + kind)

    def _send(self, to: int, array: Array, kind: int) -> Pending:
        return self._engine.send(self._ranks[to], self._tag + kind, array)

    def _receive(self, source: int, array: Array, kind: int) -> Pending:
        return self._engine.receive(self._ranks[source], self._tag + kind, array)

    def wait(self, pendings: Sequence[tuple[int, Pending]], what: str) -> None:
        self.wait_for([(peer, pending.fence) for peer, pending in pendings], 1, what)
        for _, pending in pendings:
            pending.get()

    def wait_for(self, fences: Sequence[tuple[int, AnyFence]], target: int, what: str) -> None:
        """Wait until fences, each with the peer that advances it, have reached a value.

        Raises as `wait` does.
        """
        waiting: Waiting | None = None
        for peer, fence in fences:
            if fence.wait(target, SOON):
                continue
            if waiting is None:
                waiting = Waiting(*self.patience())
            self.waits = partial(self._missing, fences, target, what)
            try:
                while fence.value < target:
                    self._go_on(peer, what)
                    waiting.tick(fence, target, self.waits)
            except HangError as failure:
                self._broken = failure
                raise
            finally:
                self.waits = None

    def _go_on(self, waited_for: int, what: str) -> None:
        """Raise what ends a wait: a run that has ended without this thread, or a failure."""
        run = context.frame().run
        if run is not None:
            run.check()
        if self._broken is not None:
            raise self._out_of_step() from self._broken
        self._check_ended(waited_for, what)

    def _missing(self, fences: Sequence[tuple[int, AnyFence]], target: int, what: str) -> str:
        late = sorted({peer for peer, fence in fences if fence.value < target})
        names = ", ".join(f"{self.names[peer]} (on {self.hosts[peer]})" for peer in late)
        return f"{self.names[self.me]} has waited for {names} to {what}, in meeting {self._met}"

    # --- MPI's own collectives

    def communicator(self, members: Sequence[int]) -> Any:
        """Return an MPI communicator of some peers. All peers must ask, each for its own group.

        Raises as `meet` does.
        """
        self.meet("make an MPI communicator")  # from then on MPI waits for them, without a deadline
        ranks = [self._ranks[member] for member in members]

        def make(mpi: Any, world: Any) -> Any:
            made = world.Create_group(world.Get_group().Incl(ranks), self._tag)
            made.Set_errhandler(mpi.ERRORS_RETURN)
            return made

        pending = self._engine.call(make)
        self.wait([(peer, pending) for peer in members], "make an MPI communicator")
        return pending.get()

    def all_reduce(self, communicator: Any, given: Array | None, total: Array) -> Pending:
        """Let MPI sum contiguous arrays over a communicator; given: None where it is `total`."""

        def begin(mpi: Any, _: Any) -> Any:
            return communicator.Iallreduce(mpi.IN_PLACE if given is None else given, total)

        return self._engine.start(begin, total.nbytes)

    # --- the end

    def check(self, what: str) -> None:
        self._check_ended(-1, what)

    @property
    def whole(self) -> bool:
        return self._broken is None

    def fail(self, failure: BaseException) -> None:
        if self._broken is None:
            self._broken = failure
        if not self._gone:
            self._gone = True
            self._tell(f"{type(failure).__name__}: {failure}", failed=True)
            self.plots.retire(self._all_ended)

    def leave(self) -> None:
        if not self._gone:
            self._gone = True
            self._tell("", failed=False)
            self.plots.retire(self._all_ended)

    def _tell(self, why: str, failed: bool) -> None:
        why = why.encode("ascii", "replace").decode()[:900]  # fits a notice, whatever JSON escapes
        notice = {"channel": self._channel, "met": self._met, "failed": failed, "why": why}
        for peer, rank in enumerate(self._ranks):
            if peer != self.me:
                self._engine.notify(rank, json.dumps(notice).encode())

    def _read_notices(self) -> None:
        notices = self._engine.notices
        if self._read == len(notices):
            return
        with self._reading:  # threads that wait for different things look at the same time
            while self._read < len(notices):
                rank, text = notices[self._read]
                notice = json.loads(text)
                if notice["channel"] in (self._channel, EVERY) and rank in self._ranks:
                    peer = self._ranks.index(rank)
                    self._ended.setdefault(peer, (notice["met"], notice["why"], notice["failed"]))
                self._read += 1

    def _all_ended(self) -> bool:
        self._read_notices()
        return len(self._ended) == self.count - 1

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
            raise self._out_of_step() from self._broken
        self._check_ended(-1, "go on")

    def _out_of_step(self) -> PeerError:
        return PeerError(
            f"{self.names[self.me]} and its peers are out of step since: "
            f"{type(self._broken).__name__}: {self._broken}; make a new strategy"
        )


def ended() -> bytes:
    """Return the notice of a rank that ends: what it has not come to by now, it never will."""
    return json.dumps({"channel": EVERY, "met": 0, "failed": False, "why": ""}).encode()


def never() -> tuple[float, float]:
    """The patience of who waits for ever, and says nothing."""
    return math.inf, math.inf
