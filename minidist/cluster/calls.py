"""Calls: what a worker asks of a parameter server (ps), and what that answers.

    worker                                       ps
    call   ──  head | text | arrays  ──►         for each worker one receive is under way
    wait   ◄── head | text | arrays  ──          the calls of a strategy are answered in their order

A message is one buffer. Its text is what the verb says it is, often JSON. A worker tells the ps
before it sends more than any message before, so that the receive under way has room for it.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minidist import context, errors, observe
from minidist.comm.flat import ALIGNMENT, Kind, aligned, places, room
from minidist.comm.mpi import Engine, Pending
from minidist.comm.peers import KINDS, Patience
from minidist.device import Array, host
from minidist.errors import HangError, MinidistError, PeerError
from minidist.kernels.rendezvous import Fence
from minidist.patience import Waiting

if TYPE_CHECKING:
    from minidist.cluster.cluster import Cluster

# Verbs. The first three are for a ps as a whole, the others for one strategy.
LEAVE, ROOM, OPEN, CLOSE, CREATE, GROUP, PUSH, WRITE, ADD, SUBTRACT, PULL, DO = range(12)

MORE, CALL, ANSWER = range(4, 7)  # tags of a channel; those of peers are others
HEAD = struct.Struct("<IIQQQQd")
FIRST = 4096  # bytes for which both sides have room from the start
log = logging.getLogger("minidist")

KEPT = 8  # buffers that are kept although nobody uses them
SOON = 500e-6  # seconds in which most answers come
SHARE = 0.9  # of a worker's patience: the ps, which knows who is late, loses its own before
GRACE = 5.0  # seconds for which a worker waits longer than the ps does, which knows for whom


class Head(NamedTuple):
    """What stands before each message.

    what: of a call its verb, of an answer 0, or 1 where it is about a failure. text, data: bytes of
    each. strategy: the channel of the strategy that it is about. room: for how long an answer there
    is room. more: how long the next message may be. patience: for how many seconds the answer may
    be held back.
    """

    what: int
    text: int
    data: int
    strategy: int = 0
    room: int = 0
    more: int = 0
    patience: float = 0.0

    @property
    def start(self) -> int:
        """At which byte the arrays begin."""
        return aligned(ALIGNMENT + self.text)

    @property
    def nbytes(self) -> int:
        return self.start + self.data

    def put(self, buffer: Array) -> None:
        HEAD.pack_into(buffer, 0, *self)

    @classmethod
    def of(cls, buffer: Array) -> Head:
        return cls(*HEAD.unpack_from(buffer))


def message(head: Head, text: bytes, arrays: Sequence[Array] = ()) -> Array:
    """Return a new buffer with a message; the head's lengths are set here."""
    kinds = [Kind.of(array) for array in arrays]
    head = head._replace(text=len(text), data=room(kinds))
    buffer = host().allocate((head.nbytes,), np.uint8)
    head.put(buffer)
    buffer[ALIGNMENT : ALIGNMENT + len(text)] = np.frombuffer(text, np.uint8)
    for place, array in zip(places(buffer, head.start, kinds), arrays, strict=True):
        host().copy(place, array)
    return buffer


def text_of(buffer: Array, head: Head) -> bytes:
    """Return the text of a message."""
    return bytes(buffer[ALIGNMENT : ALIGNMENT + head.text])


def as_text(what: Any) -> bytes:
    """Return something that JSON can say as a text."""
    return json.dumps(what).encode()


# --- the worker's side --------------------------------------------------------------------------


class Line:
    """This worker's way to one ps."""

    def __init__(self, engine: Engine, rank: int, channel: int) -> None:
        self.engine, self.rank = engine, rank
        self._tag = channel * KINDS + CALL
        self._lock = threading.Lock()
        self._room = FIRST  # which the ps has for the next message

    def send(self, buffer: Array) -> Pending:
        """Send a message, which stays as it is until this is done."""
        with self._lock:
            if len(buffer) > self._room:
                self._room = len(buffer)
                announced = message(Head(ROOM, 0, 0, more=self._room), b"")
                self.engine.send(self.rank, self._tag, announced)
            return self.engine.send(self.rank, self._tag, buffer)

    def leave(self) -> None:
        """Tell the ps that this worker asks for nothing more."""
        self.send(message(Head(LEAVE, 0, 0), b""))


class Received:
    """A message that has arrived: a text and arrays."""

    __slots__ = ("buffer", "head")

    def __init__(self, head: Head, buffer: Array) -> None:
        self.head, self.buffer = head, buffer

    @property
    def text(self) -> bytes:
        return text_of(self.buffer, self.head)

    @property
    def said(self) -> Any:
        """What the text says in JSON."""
        return json.loads(self.text)

    def arrays(self, kinds: Sequence[Kind]) -> list[Array]:
        """Return the arrays, of these kinds, as they lie in the buffer."""
        return places(self.buffer, self.head.start, kinds)


class Caller:
    """A strategy's calls from this worker to the ps.

    channel: the strategy's; its answers come there. check: raises where there is no use in waiting
    any longer.
    """

    def __init__(
        self, cluster: Cluster, channel: int, patience: Patience, check: Callable[[str], None]
    ) -> None:
        self.channel = channel
        self.cluster = cluster
        self.check = check
        self.patience = patience
        self.names = tuple(cluster.name(rank) for rank in cluster.servers)
        self._lock = threading.Lock()
        self.broken: BaseException | None = None
        self.waits: Callable[[], str] | None = None  # says what a thread waits for

    def where(self, task: int) -> str:
        """Return what a ps is called, and where it is."""
        rank = self.cluster.servers[task]
        assert self.cluster.engine is not None
        return f"{self.names[task]} (on {self.cluster.engine.hosts[rank]})"

    def call(
        self,
        task: int,
        verb: int,
        text: bytes = b"",
        arrays: Sequence[Array] = (),
        *,
        what: str,
        room: int = FIRST,
        seconds: float = 0.0,
    ) -> Call:
        """Ask something of a ps.

        what: it in words, for errors. room: bytes of the answer, where that is known. seconds: for
        how much longer than for others to wait for it.
        """
        into = host().allocate((max(room, FIRST),), np.uint8)
        buffer = message(self.head(verb, 0, 0, len(into)), text, arrays)
        return self.post(task, buffer, into, what, seconds)

    def head(self, verb: int, text: int, data: int, room: int) -> Head:
        """Return the head of a message of this strategy whose lengths are known."""
        patience = SHARE * self.patience()[1]
        return Head(verb, text, data, self.channel, room, patience=patience)

    def post(self, task: int, buffer: Array, into: Array, what: str, seconds: float = 0.0) -> Call:
        """Send a whole message; the answer comes into an array of as many bytes as the head says.

        Both are in use until the answer is there. seconds: see `call`.
        """
        if self.broken is not None:
            raise PeerError(
                f"{self.cluster.me} and its ps are out of step since: "
                f"{type(self.broken).__name__}: {self.broken}; make a new strategy"
            ) from self.broken
        line = self.cluster.lines[task]
        with self._lock:  # answers come in the order of the calls
            arriving = line.engine.receive(line.rank, self._tag, into)
            return Call(self, task, line.send(buffer), arriving, into, what, seconds)

    @property
    def _tag(self) -> int:
        return self.channel * KINDS + ANSWER

    def rest(self, task: int, array: Array) -> Pending:
        """Receive what of an answer had no room in the array that was given for it."""
        line = self.cluster.lines[task]
        return line.engine.receive(line.rank, self.channel * KINDS + MORE, array)


class Call:
    """A call that is on its way."""

    __slots__ = ("_arriving", "_caller", "_into", "_leaving", "_seconds", "_task", "what")

    def __init__(
        self,
        caller: Caller,
        task: int,
        leaving: Pending,
        arriving: Pending,
        into: Array,
        what: str,
        seconds: float,
    ) -> None:
        self._caller, self._task, self._seconds = caller, task, seconds
        self._leaving, self._arriving, self._into = leaving, arriving, into
        self.what = what

    def wait(self) -> Received:
        """Wait for the answer, whose arrays lie in what was given for it.

        Raises what has gone wrong on the ps, with its name; PeerError where the ps, or a worker
        that this one is in step with, has ended; HangError after the deadline.
        """
        with observe.span("peers", self.what):
            self._await(self._arriving)
        buffer, head = self._into, Head.of(self._into)
        if head.nbytes > len(buffer):
            whole = host().allocate((head.nbytes,), np.uint8)
            whole[: len(buffer)] = buffer
            self._await(self._caller.rest(self._task, whole[len(buffer) :]))
            buffer = self._into = whole
        answer = Received(head, buffer)
        if head.what != 0:
            raise self._failure(answer.said)
        return answer

    def _await(self, pending: Pending) -> None:
        caller = self._caller
        if not pending.fence.wait(1, SOON):
            report_after, deadline = caller.patience()
            waiting = Waiting(report_after + self._seconds, deadline + GRACE + self._seconds)
            caller.waits = self._missing
            try:
                while not pending.done:
                    self._go_on()
                    waiting.tick(pending.fence, 1, self._missing)
            except HangError as failure:
                caller.broken = failure
                raise
            finally:
                caller.waits = None
        try:
            pending.get()
        except MinidistError as failure:
            caller.broken = failure
            raise PeerError(
                f"{caller.where(self._task)} cannot be reached by {caller.cluster.me}, which "
                f"wants to {self.what}: {failure}"
            ) from failure

    def _go_on(self) -> None:
        """Raise what ends the wait: a run that has ended without this thread, or a failure."""
        run = context.frame().run
        if run is not None:
            run.check()
        self._caller.check(self.what)
        if self._leaving.failure is not None:
            self._caller.broken = self._leaving.failure
            raise self._leaving.failure

    def _missing(self) -> str:
        caller = self._caller
        return (
            f"{caller.cluster.me} has waited for {caller.where(self._task)} to {self.what}; is it "
            "in cluster.serve()?"
        )

    def _failure(self, said: dict[str, str]) -> BaseException:
        kind = getattr(errors, said["type"], None)
        where = f"{self._caller.where(self._task)}, asked by {self._caller.cluster.me} to"
        if isinstance(kind, type) and issubclass(kind, MinidistError):
            return kind(f"{where} {self.what}: {said['text']}")
        return PeerError(f"{where} {self.what}, has failed: {said['type']}: {said['text']}")


# --- the side of the ps -------------------------------------------------------------------------


class Letter(Received):
    """A call that has arrived from a worker. Its arrays may be written to until the answer."""

    __slots__ = ("_desk", "since", "worker")

    def __init__(self, desk: Desk, worker: int, head: Head, buffer: Array, since: float) -> None:
        super().__init__(head, buffer)
        self._desk, self.worker, self.since = desk, worker, since

    def answer(self, text: bytes = b"", arrays: Sequence[Array] = ()) -> None:
        """Answer it. Nothing of the letter is used any more."""
        self.answer_by(message(Head(0, 0, 0), text, arrays))

    def refuse(self, failure: BaseException) -> None:
        """Answer that it could not be done."""
        said = {"type": type(failure).__name__, "text": str(failure)}
        self.answer_by(message(Head(1, 0, 0), as_text(said)))

    def answer_by(self, buffer: Array) -> list[Pending]:
        """Answer by a whole message, which stays as it is until what this returns is done."""
        return self._desk.send(self, buffer)


class Lent:
    """A buffer for answers, in use until what was sent of it has left."""

    __slots__ = ("_sent", "buffer", "whole")

    def __init__(self, whole: Array) -> None:
        self.whole = self.buffer = whole
        self._sent: list[Pending] = []

    @property
    def idle(self) -> bool:
        self._sent = [pending for pending in self._sent if not pending.done]
        return not self._sent

    def answer(self, letter: Letter) -> None:
        """Send the buffer, which has a whole message, as the answer to a letter."""
        self._sent += letter.answer_by(self.buffer)


class Desk:
    """Where the calls of all workers of a cluster arrive at this ps."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.engine is not None
        self._engine = cluster.engine
        self._cluster = cluster
        self._tag = cluster.call_channel * KINDS + CALL
        self._bell = Fence()
        self._room = dict.fromkeys(range(len(cluster.workers)), FIRST)
        self._arriving: dict[int, tuple[Pending, Array]] = {}
        self._free: list[Array] = []  # buffers whose letters have been answered
        self._lent: list[Lent] = []
        for worker in self._room:
            self._listen_to(worker)

    def _listen_to(self, worker: int) -> None:
        room = self._room[worker]
        fitting = [i for i, buffer in enumerate(self._free) if len(buffer) == room]
        buffer = self._free.pop(fitting[0]) if fitting else host().allocate((room,), np.uint8)
        rank = self._cluster.workers[worker]
        pending = self._engine.receive(rank, self._tag, buffer, self._bell)
        self._arriving[worker] = pending, buffer

    @property
    def workers(self) -> list[int]:
        """The workers that have not left: more may come from them."""
        return list(self._arriving)

    def letters(self, seconds: float) -> list[Letter]:
        """Return what has arrived since, waiting for it for some seconds, asleep."""
        rung = self._bell.value
        done = self._done()
        if not done:
            self._bell.wait(rung + 1, seconds)
            done = self._done()
        letters = []
        for worker in done:
            pending, buffer = self._arriving.pop(worker)
            if pending.failure is not None:
                name = self._cluster.name(self._cluster.workers[worker])
                log.warning(
                    "%s has ended without a word (%s): what it had sent is done, and what it had "
                    "yet to send is lost",
                    name,
                    pending.failure,
                )
                continue
            head = Head.of(buffer)
            if head.what == LEAVE:
                continue
            if head.more > self._room[worker]:
                self._room[worker] = head.more
                self._free = [buffer for buffer in self._free if len(buffer) in self._rooms()]
            self._listen_to(worker)
            if head.what != ROOM:
                letters.append(Letter(self, worker, head, buffer, time.monotonic()))
        return letters

    def _rooms(self) -> set[int]:
        return set(self._room.values())

    def _done(self) -> list[int]:
        return [worker for worker, (pending, _) in self._arriving.items() if pending.done]

    def lend(self, nbytes: int) -> Lent:
        """Return a buffer for an answer of so many bytes."""
        idle = [lent for lent in self._lent if lent.idle]
        for lent in idle:
            if nbytes <= len(lent.whole) <= 2 * nbytes:
                self._lent.remove(lent)
                break
        else:
            for lent in idle[: max(0, len(idle) - KEPT)]:
                self._lent.remove(lent)
            lent = Lent(host().allocate((nbytes,), np.uint8))
        self._lent.append(lent)  # the one that was used last is the last
        lent.buffer = lent.whole[:nbytes]
        return lent

    def send(self, letter: Letter, buffer: Array) -> list[Pending]:
        """Send the answer to a letter, in two parts where the worker has less room.

        The buffer stays as it is until all that is returned is done.
        """
        rank = self._cluster.workers[letter.worker]
        channel, room = letter.head.strategy * KINDS, letter.head.room
        if len(letter.buffer) in self._rooms():
            self._free.append(letter.buffer)
        sent = [self._engine.send(rank, channel + ANSWER, buffer[:room])]
        if len(buffer) > room:  # not to be taken for the answer to the worker's next call
            sent.append(self._engine.send(rank, channel + MORE, buffer[room:]))
        return sent
