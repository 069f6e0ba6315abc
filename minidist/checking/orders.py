"""Orders: what each thread and stream has seen of what the others did, as it is told.

a stream            has seen what was before each `submit`; who waits for its event, the work
a GPU's stream      has seen what was before each piece; who waits for its event, or follows it, too
a run               replicas have seen what its caller did before, the caller what they all did
a meeting           who merges has seen what all did before it, all what the merge function did
a hand-over         who takes from a lock, queue or thread has seen what those did who gave
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

from minidist import observe
from minidist.checking.clocks import Actor, Clock, StreamActor, joined
from minidist.checking.places import Stack, stack
from minidist.device.cpu import ThreadEvent


class _Here(threading.local):
    """Who the calling thread is, and for whom it works."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []  # the thread itself, then streams whose work it does
        self.submitted: list[Stack] = [()]
        self.looking = False  # whether the checker itself is asking an event


class _Guard:
    """A lock around what is known. The garbage collector may come while it is held.

    What it tells then is `late`: heard when the guard is left.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._late: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        try:
            while self._late and self._depth == 1:
                self._late.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()

    def later(self, hear: Callable[[], None]) -> None:
        """Hear something when nothing else is in the middle of being heard."""
        with self:
            self._late.append(hear)


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
        self.running: dict[int, Actor] = {}  # replicas
        self.meetings: dict[int, _Meeting] = {}


class Orders(observe.Observer):
    """Keeps a clock for each thread and stream."""

    def __init__(self) -> None:
        self._lock = _Guard()
        self._numbers = itertools.count()
        self._here = _Here()
        self._streams: weakref.WeakKeyDictionary[Any, StreamActor] = weakref.WeakKeyDictionary()
        self._pieces: dict[tuple[int, int], tuple[Clock, Stack]] = {}
        self._events: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()  # of GPUs
        self._runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
        self._given_names: dict[Any, Clock] = {}  # for keys such as texts and numbers

    # --- who

    def _actor(self) -> Actor:
        actors = self._here.actors
        if not actors:
            me = threading.get_ident()
            main = me == threading.main_thread().ident
            name = "the main thread" if main else f"thread {me}"
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
        with self._lock:
            self._actor()
            actor = self._stream(stream)
            clock, where = self._pieces.pop((actor.number, position), (None, ()))
            actor.take(clock)
            actor.begin(position)
            self._here.actors.append(actor)
            self._here.submitted.append(where)

    def done(self, stream: Any, position: int) -> None:
        with self._lock:
            if len(self._here.actors) > 1:
                self._here.actors.pop()
                self._here.submitted.pop()
                self._stream(stream).end(position)

    def waited(self, event: Any) -> None:
        if self._here.looking:
            return
        with self._lock:
            self._actor().take(self._before(event))

    def _before(self, event: Any) -> Clock | None:
        """Return what an event's stream has seen and done before it."""
        if isinstance(event, ThreadEvent):
            return self._stream(event.stream).after(event.position)
        return self._events.get(event)

    def recorded(self, event: Any) -> None:
        if not isinstance(event, ThreadEvent):  # may be the garbage collector's doing
            self._lock.later(partial(self._recorded, event))

    def _recorded(self, event: Any) -> None:
        self._events[event] = self._stream(event.stream).give()

    def followed(self, stream: Any, event: Any) -> None:
        with self._lock:
            self._stream(stream).take(self._before(event))

    def _given_to(self, stream: Any) -> StreamActor:
        """Return a GPU's stream, which is given something by the calling thread."""
        actor = self._stream(stream)
        actor.take(self._actor().give())
        return actor

    # --- runs and meetings

    def posted(self, run: Any) -> None:
        with self._lock:
            self._runs[run] = _Run(self._actor().give())

    def started(self, run: Any, replica: int) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            with self._lock:
                heard.running[replica] = self._actor()
                self._actor().take(heard.begin)

    def ended(self, run: Any, replica: int) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            with self._lock:
                heard.running.pop(replica, None)
                heard.end = joined(heard.end, self._actor().give())

    def joined(self, run: Any) -> None:
        heard = self._runs.get(run)
        if heard is not None:
            with self._lock:
                self._actor().take(heard.end)
                for abandoned in heard.running.values():  # what it does from now on is unordered
                    self._actor().take(abandoned.give())

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
            given = self._given_for(key)
            given[key] = joined(given.get(key, {}), self._actor().give())

    def _given_for(self, key: Any) -> MutableMapping[Any, Clock]:
        """Return where it stands what was given for a key, of whatever kind it is."""
        return self._given_names if isinstance(key, str | bytes | int | tuple) else self._given

    def took(self, key: Any) -> None:
        with self._lock:
            actor = self._actor()
            actor.take(self._given_for(key).get(key))
            if (
                isinstance(key, threading.Thread) and key.ident == threading.get_ident()
            ):  # it begins
                actor.name = f"thread {key.name!r}"
