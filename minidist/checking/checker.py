"""Checker: the observer that finds accesses to the same bytes which nothing orders.

Every access is compared with the last ones to the same bytes: it must have seen the last write, and
a write also all reads since. What one has seen goes on from thread to stream and from thread to
thread where they wait for each other, and nowhere else; that the two were apart in time, this time,
is no order.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from minidist import observe
from minidist.checking.clocks import Actor, Clock, StreamActor, joined
from minidist.checking.handovers import HAND_OVERS
from minidist.checking.memory import Buffer, Memory, owner_of, poison, span
from minidist.checking.places import Access, Race, Stack, race, stack
from minidist.checking.verbs import VERBS
from minidist.device import known
from minidist.errors import RaceError
from minidist.variable import Copy

log = logging.getLogger("minidist")


class _Here(threading.local):
    """Who the calling thread is, and for whom it works."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []  # the thread itself, then streams whose work it does
        self.submitted: list[Stack] = [()]
        self.looking = False  # whether the checker itself is asking an event


class _Meeting:
    """What those who met have given, until all have taken it."""

    def __init__(self, replicas: int) -> None:
        self.clock: Clock = {}
        self.merging: int | None = None
        self.left = replicas


class _Run:
    """What a run's caller has given, and its replicas."""

    def __init__(self, begin: Clock) -> None:
        self.begin = begin
        self.end: Clock = {}
        self.meetings: dict[int, _Meeting] = {}


class Checker(observe.Observer):
    """Listens from `begin_checking` to `end_checking`; `races` are the ones found so far.

    Each pair of places is reported once: logged at once, raised by `verify`.
    """

    careful = True

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._unraised: list[Race] = []
        self._known: set[tuple[str, str]] = set()
        self._lock = threading.RLock()  # the garbage collector may come in between
        self._numbers = itertools.count()
        self._here = _Here()
        self._streams: weakref.WeakKeyDictionary[Any, StreamActor] = weakref.WeakKeyDictionary()
        self._pieces: dict[tuple[int, int], tuple[Clock, Stack]] = {}
        self._runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
        self._memory = Memory()

    # --- who

    def _actor(self) -> Actor:
        actors = self._here.actors
        if not actors:
            me = threading.get_ident()
            main = me == threading.main_thread().ident
            name = "the main thread" if main else f"thread {me}"
            with self._lock:
                actors.append(Actor(next(self._numbers), name))
        return actors[-1]

    def _stream(self, stream: Any) -> StreamActor:
        actor = self._streams.get(stream)
        if actor is None:
            actor = self._streams[stream] = StreamActor(next(self._numbers), stream)
        return actor

    # --- streams and events

    def submitted(self, stream: Any, position: int) -> None:
        with self._lock:
            key = self._stream(stream).number, position
            self._pieces[key] = self._actor().give(), stack(3)

    def begun(self, stream: Any, position: int) -> None:
        self._actor()
        with self._lock:
            actor = self._stream(stream)
            clock, where = self._pieces.pop((actor.number, position), (None, ()))
            actor.take(clock)
            actor.begin(position)
        self._here.actors.append(actor)
        self._here.submitted.append(where)

    def done(self, stream: Any, position: int) -> None:
        if len(self._here.actors) > 1:
            self._here.actors.pop()
            self._here.submitted.pop()
            with self._lock:
                self._stream(stream).end(position)

    def waited(self, event: Any) -> None:
        if self._here.looking:
            return
        with self._lock:
            self._actor().take(self._stream(event.stream).after(event.position))

    # --- runs and meetings

    def posted(self, run: Any) -> None:
        self._runs[run] = _Run(self._actor().give())

    def started(self, run: Any, replica: int) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            self._actor().take(heard.begin)

    def ended(self, run: Any, replica: int) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            with self._lock:
                heard.end = joined(heard.end, self._actor().give())

    def joined(self, run: Any) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            self._actor().take(heard.end)

    def arrived(self, run: Any, replica: int, meeting: int) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            with self._lock:
                place = heard.meetings.setdefault(meeting, _Meeting(run.n))
                place.clock = joined(place.clock, self._actor().give())

    def met(self, run: Any, replica: int, meeting: int) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            with self._lock:
                place = heard.meetings[meeting]
                place.merging = replica
                self._actor().take(place.clock)

    def released(self, run: Any, replica: int, meeting: int) -> None:
        heard = self._runs.get(run)
        if heard is None:
            return
        with self._lock:
            place = heard.meetings[meeting]
            if replica == place.merging:
                place.clock = self._actor().give()
            else:
                self._actor().take(place.clock)
            place.left -= 1
            if not place.left:
                del heard.meetings[meeting]

    # --- hand-overs of other kinds

    def gave(self, key: Any) -> None:
        with self._lock:
            self._given[key] = joined(self._given.get(key, {}), self._actor().give())

    def took(self, key: Any) -> None:
        with self._lock:
            actor = self._actor()
            actor.take(self._given.get(key))
            if isinstance(key, threading.Thread) and key.ident == threading.get_ident():  # it begins
                actor.name = f"thread {key.name!r}"

    # --- memory

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any], what: str) -> None:
        actor = self._actor()
        access = Access(actor, what, stack(3), self._here.submitted[-1])
        with self._lock:
            for array in reads:
                self._access(array, access, False)
            for array in writes:
                self._access(array, access, True)

    def _access(self, array: Any, access: Access, writes: bool) -> None:
        if not array.size:
            return
        buffer = self._memory.buffer(array)
        if buffer.freed is not None and not self._is_awaited(buffer, access.actor):
            self._report(array, (buffer.freed, "return to the pool"), (access, _kind(writes)))
        actor, clock = access.actor, access.actor.clock
        for cell in buffer.between(*span(array)):
            last = cell.write
            if last is not None and last.time > clock.get(last.actor.number, 0):
                self._report(array, (last, "write"), (access, _kind(writes)))
            if not writes:
                cell.reads[actor.number] = access
                continue
            for number, read in cell.reads.items():
                if read.time > clock.get(number, 0):
                    self._report(array, (read, "read"), (access, "write"))
            cell.write = access
            if cell.reads:
                cell.reads = {}

    def _is_awaited(self, buffer: Buffer, actor: Actor) -> bool:
        """Whether what an actor does is before an event that the pool waits for.

        Or may be, where that is an event of a kind of stream that tells nothing.
        """
        for event in buffer.events:
            stream = getattr(event, "stream", None)
            if stream in self._streams:
                if isinstance(actor, StreamActor) and actor.stream is stream:
                    return bool(actor.position <= event.position)
            elif not self._is_done(event):
                return True
        return False

    def _is_done(self, event: Any) -> bool:
        """Ask an event without waiting for it in anybody's name."""
        self._here.looking = True
        try:
            return bool(event.done())
        finally:
            self._here.looking = False

    def given_back(self, array: Any, events: Sequence[Any], shared: bool) -> None:
        with self._lock:
            buffer = self._memory.buffer(array)
            actor = self._actor()
            if shared:  # the views are gone, and with them those who read through them
                buffer.forget_reads()
            buffer.events = tuple(events)
            buffer.freed = Access(actor, "release", stack(3), self._here.submitted[-1])
            buffer.released = actor.give()
            self._poison(buffer, array)

    def leased(self, array: Any) -> None:
        with self._lock:
            buffer = self._memory.buffer(array)
            actor = self._actor()
            buffer.freed = None
            actor.take(buffer.released)
            for event in buffer.events:
                if getattr(event, "stream", None) in self._streams and self._is_done(event):
                    self.waited(event)
            self._poison(buffer, array)
            buffer.poisoned = False

    def _poison(self, buffer: Buffer, array: Any) -> None:
        """Poison a buffer that nobody reads any more."""
        if not buffer.poisoned and all(self._is_done(event) for event in buffer.events):
            poison(array)
            buffer.poisoned = True

    # --- what was found

    def _report(self, array: Any, first: tuple[Access, str], second: tuple[Access, str]) -> None:
        lines = first[0].line(), second[0].line()
        if lines in self._known:
            return
        self._known.add(lines)
        found = race(_memory_name(array), *(access.told(kind) for access, kind in (first, second)),
                     lines, _cure(first, second))
        self.races.append(found)
        self._unraised.append(found)
        log.error("%s", found)

    def verify(self) -> None:
        """Raise RaceError for the races that were found since the last call."""
        found, self._unraised = self._unraised, []
        if found:
            raise RaceError("\n".join(map(str, found)))

    # --- from when to when

    def begin_checking(self) -> None:
        for device in known():
            device.synchronize()  # what they still had to do was never heard of
        VERBS.begin()
        HAND_OVERS.begin()
        observe.attach(self)

    def end_checking(self) -> None:
        observe.detach(self)
        HAND_OVERS.end()
        VERBS.end()


class check:
    """Check from now on; as a with statement's way, until its end, which raises RaceError.

    `races` are those found so far.
    """

    def __init__(self) -> None:
        self._checker = Checker()
        self._checker.begin_checking()

    @property
    def races(self) -> Sequence[Race]:
        return tuple(self._checker.races)

    def verify(self) -> None:
        """Raise RaceError for the races that were found and not raised yet."""
        self._checker.verify()

    def end(self) -> None:
        """Check no more."""
        self._checker.end_checking()

    def __enter__(self) -> check:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end()
        if kind is None:
            self.verify()


def _kind(writes: bool) -> str:
    return "write" if writes else "read"


def _memory_name(array: Any) -> str:
    """Say what an array is: of which variable, if it is one's."""
    owner = owner_of(array)
    start, end = span(array)
    what = f"{array.dtype}{list(array.shape)}"
    for copy in gc.get_objects():
        if isinstance(copy, Copy) and owner_of(copy.array) is owner:
            low, high = span(copy.array)
            if low < end and start < high:
                return f"variable {copy.name!r} on {copy.device.short} ({what})"
    return what


def _cure(first: tuple[Access, str], second: tuple[Access, str]) -> str:
    if first[1] == "return to the pool":
        return (
            "Release a lease after its last use, or after the events of those who still use its "
            "buffer"
        )
    streams = [access.actor for access, _ in (first, second) if isinstance(access.actor, StreamActor)]
    if streams:
        return (
            f"Let the second wait for the first: take {streams[0].name}'s event by record() after "
            "the work was given, and wait for it"
            if isinstance(first[0].actor, StreamActor)
            else "Do the first before the work of the second is given to the stream, or let it "
            "wait for the stream's event"
        )
    return (
        "Meet between the two (merge_call), hand over by a StagingArea, a queue or a thread's join, "
        "or give each its own memory"
    )
