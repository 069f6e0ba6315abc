"""Observe: what happens while replicas work, told to whoever watches. By default nobody does.

The places where something happens say so:

    if observe.counting:
        observe.moved("host", "cpu:1", array.nbytes, "input")
    with observe.span("reduce", "all_reduce"):
        ...

and each instrument (bytes, staleness, timeline, race checker) is an `Observer` that listens to what
it needs. While nobody watches, a place costs the look at `watching`,
or at `counting`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from minidist.errors import UsageError

_lock = threading.Lock()
nothing = nullcontext()  # a with statement's way to tell of nothing


class Observer:
    """Hears everything, on the thread where it happens, and does nothing with it.

    A method must be quick, must not raise, and may be called from many threads at once. Only what
    plants faults may do otherwise, and says so.
    """

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> Any:
        """Hear that the calling thread begins something; what is returned comes back to `end`."""

    def end(self, token: Any) -> None:
        """Hear that it has ended, be it by an exception. Ends come in the opposite order."""

    def tick(self, kind: str, name: str, about: dict[str, Any]) -> None:
        """Hear of something that takes no time, on the calling thread."""

    def moved(self, source: str, destination: str, nbytes: int, what: str) -> None:
        """Hear that bytes went from one device's memory to another's, by their short names.

        what: "reads" (variables, to who computes with them), "sums" (over the replicas), "network"
        (both, between processes, whose names are then the ends), "rows" (of sparse gradients),
        "staging", "input", or "values" for what is neither.
        """

    careful: ClassVar[bool] = False  # whether replicas compare what they do before they do it

    def applied(self, variable: str, replica: int, age: int) -> None:
        """Hear that a replica's gradient of a variable is about to be applied.

        age: how often the variable has changed since the replica read what the gradient comes from.
        """

    # What orders threads and streams: who hears the second has seen all before the first.

    def recorded(self, event: Any) -> None:
        """Hear that a stream's event was made, for the work that the stream was given so far."""

    def waited(self, event: Any) -> None:
        """Hear that the calling thread, perhaps a stream's own, has waited for an event."""

    def put(self, slot: Any) -> None:
        """Hear that an item was put into a staging area."""

    def got(self, slot: Any) -> None:
        """Hear that it was taken out, or looked at."""

    def arrived(self, run: Any, replica: int, meeting: int) -> None:
        """Hear that a replica has come to its meeting of this number, from 1, in a run."""

    def released(self, run: Any, replica: int, meeting: int) -> None:
        """Hear that it goes on, the merge function having been run."""

    def met(self, run: Any, replica: int, meeting: int) -> None:
        """Hear that all have arrived, and that this replica goes on for them until it is released.

        It is told by that replica alone, which is released before the others.
        """

    def posted(self, run: Any) -> None:
        """Hear that the calling thread gives a run to its replicas."""

    def started(self, run: Any, replica: int) -> None:
        """Hear that a replica has begun."""

    def ended(self, run: Any, replica: int) -> None:
        """Hear that it has done what it had to do."""

    def joined(self, run: Any) -> None:
        """Hear that all replicas of a run have ended, on the thread that has posted it."""

    def submitted(self, stream: Any, position: int) -> None:
        """Hear that a stream is given its piece of work of this number, from 1."""

    def begun(self, stream: Any, position: int) -> None:
        """Hear that the calling thread does that piece, for the stream."""

    def done(self, stream: Any, position: int) -> None:
        """Hear that it has done it, be it that it failed."""

    def gave(self, key: Any) -> None:
        """Hear that the calling thread hands over what it has done to all who take from `key`.

        This and `took` are for hand-overs of any other kind, by a lock or a queue.
        """

    def took(self, key: Any) -> None:
        """Hear that the calling thread has taken over what was given to `key` before."""

    # Memory.

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any], what: str) -> None:
        """Hear that the calling thread reads and writes arrays now; `what` is the verb that does.

        Told by GPUs' devices, of the host's memory, and else only while `minidist.checking` watches
        the verbs.
        """

    def worked(self, work: Any, implementation: str) -> None:
        """Hear that the calling thread does work by the implementation that was chosen for it.

        Told within the verb whose work it is.
        """

    def leased(self, array: Any) -> None:
        """Hear that a buffer has come out of a pool."""

    def given_back(self, array: Any, events: Sequence[Any], shared: bool) -> None:
        """Hear that a buffer goes back to its pool, for use after some events.

        Where it was `shared` with those who only drop it, they all have. May be told by the garbage
        collector, anywhere.
        """

    # What a GPU's streams are given. Threads go on meanwhile.

    def giving(self, stream: Any, what: str, reads: Sequence[Any], writes: Sequence[Any]) -> Any:
        """Hear that the calling thread gives a piece of work to a stream, after all it waits for.

        It reads and writes arrays: the GPU's, or pinned ones of the host's. What is returned comes
        back to `given`.
        """

    def given(self, token: Any) -> None:
        """Hear that the stream has been given the whole piece."""

    def followed(self, stream: Any, event: Any) -> None:
        """Hear that what a stream is given from now on comes after an event."""

    def allocated(self, block: Any, stream: Any) -> None:
        """Hear that free memory of a GPU has become a block, for what a stream is given now."""

    def mapped(self, memory: Any) -> None:
        """Hear that CUDA has given memory to a pool: whatever was at its addresses is over."""

    # Waiting.

    def waiting(self, ready: Callable[[], bool]) -> None:
        """Hear that the calling thread is about to wait until `ready()`, or for less long."""

    def woke(self, thread: threading.Thread) -> None:
        """Hear that a thread that waits for work has been given some."""

    def ending(self) -> None:
        """Hear that the calling thread tells nothing any more."""

    def verify(self) -> None:
        """Raise what is wrong with what was heard so far. Called where a run has ended well."""


watching: tuple[Observer, ...] = ()
counting: tuple[Observer, ...] = ()  # those who hear of bytes and ages, which are few facts

COUNTS = ("moved", "applied")
_FACTS = [name for name, value in vars(Observer).items() if callable(value)]


def attach(observer: Observer) -> None:
    """Let an observer watch from now on, in all threads.

    It belongs to `counting` where its class has a method for what is counted, and to `watching`
    unless it has no other. Raises UsageError for one that watches already: it would hear all twice.
    """
    global watching, counting
    heard = {name for name in _FACTS if getattr(type(observer), name) is not vars(Observer)[name]}
    with _lock:
        if any(each is observer for each in (*watching, *counting)):
            raise UsageError(
                f"this {type(observer).__name__} watches already; make another one for a with "
                "statement inside its own"
            )
        if heard.difference(COUNTS) or not heard:
            watching = (*watching, observer)
        if heard.intersection(COUNTS):
            counting = (*counting, observer)


def detach(observer: Observer) -> None:
    """Let it watch no more."""
    global watching, counting
    with _lock:
        watching = tuple(each for each in watching if each is not observer)
        counting = tuple(each for each in counting if each is not observer)


@contextmanager
def attached(observer: Observer) -> Iterator[None]:
    """Let an observer watch for the length of a with statement, in all threads."""
    attach(observer)
    try:
        yield
    finally:
        detach(observer)


def careful() -> bool:
    """Whether somebody watches who wants replicas to compare what they do before they do it."""
    return any(observer.careful for observer in watching)


def span(kind: str, name: str, **about: Any) -> AbstractContextManager[None]:
    """Return a with statement's way to tell of something that takes time."""
    return Span(kind, name, about) if watching else nothing


class Span:
    """Something that takes time, told to whoever watches when it begins."""

    __slots__ = ("_about", "_kind", "_name", "_tokens")

    def __init__(self, kind: str, name: str, about: dict[str, Any]) -> None:
        self._kind, self._name, self._about = kind, name, about

    def __enter__(self) -> None:
        kind, name, about = self._kind, self._name, self._about
        self._tokens = [(each, each.begin(kind, name, about)) for each in watching]

    def __exit__(self, *exception: object) -> None:
        for observer, token in reversed(self._tokens):
            observer.end(token)


def piece(
    stream: Any, what: str, reads: Sequence[Any], writes: Sequence[Any]
) -> AbstractContextManager[None]:
    """Return a with statement's way to tell of a piece of work that a GPU's stream is given."""
    return Giving(stream, what, reads, writes) if watching else nothing


class Giving:
    """A piece of work, told to whoever watches when it begins to be given."""

    __slots__ = ("_about", "_tokens")

    def __init__(self, *about: Any) -> None:
        self._about = about

    def __enter__(self) -> None:
        self._tokens = [(each, each.giving(*self._about)) for each in watching]

    def __exit__(self, *exception: object) -> None:
        for observer, token in reversed(self._tokens):
            observer.given(token)


def tick(kind: str, name: str, **about: Any) -> None:
    """Tell of something that takes no time."""
    for observer in watching:
        observer.tick(kind, name, about)


def moved(source: str, destination: str, nbytes: int, what: str) -> None:
    """Tell of bytes that went from one device to another; within one device none do."""
    if source != destination and nbytes:
        for observer in counting:
            observer.moved(source, destination, nbytes, what)


def applied(variable: str, replica: int, age: int) -> None:
    for observer in counting:
        observer.applied(variable, replica, age)


def recorded(event: Any) -> None:
    for observer in watching:
        observer.recorded(event)


def waited(event: Any) -> None:
    for observer in watching:
        observer.waited(event)


def put(slot: Any) -> None:
    for observer in watching:
        observer.put(slot)


def got(slot: Any) -> None:
    for observer in watching:
        observer.got(slot)


def arrived(run: Any, replica: int, meeting: int) -> None:
    for observer in watching:
        observer.arrived(run, replica, meeting)


def released(run: Any, replica: int, meeting: int) -> None:
    for observer in watching:
        observer.released(run, replica, meeting)


def met(run: Any, replica: int, meeting: int) -> None:
    for observer in watching:
        observer.met(run, replica, meeting)


def posted(run: Any) -> None:
    for observer in watching:
        observer.posted(run)


def started(run: Any, replica: int) -> None:
    for observer in watching:
        observer.started(run, replica)


def ended(run: Any, replica: int) -> None:
    for observer in watching:
        observer.ended(run, replica)


def joined(run: Any) -> None:
    for observer in watching:
        observer.joined(run)


def submitted(stream: Any, position: int) -> None:
    for observer in watching:
        observer.submitted(stream, position)


def begun(stream: Any, position: int) -> None:
    for observer in watching:
        observer.begun(stream, position)


def done(stream: Any, position: int) -> None:
    for observer in watching:
        observer.done(stream, position)


def gave(key: Any) -> None:
    for observer in watching:
        observer.gave(key)


def took(key: Any) -> None:
    for observer in watching:
        observer.took(key)


def accessed(reads: Sequence[Any], writes: Sequence[Any], what: str) -> None:
    for observer in watching:
        observer.accessed(reads, writes, what)


def worked(work: Any, implementation: str) -> None:
    for observer in watching:
        observer.worked(work, implementation)


def leased(array: Any) -> None:
    for observer in watching:
        observer.leased(array)


def given_back(array: Any, events: Sequence[Any], shared: bool) -> None:
    for observer in watching:
        observer.given_back(array, events, shared)


def followed(stream: Any, event: Any) -> None:
    for observer in watching:
        observer.followed(stream, event)


def allocated(block: Any, stream: Any) -> None:
    for observer in watching:
        observer.allocated(block, stream)


def mapped(memory: Any) -> None:
    for observer in watching:
        observer.mapped(memory)


def waiting(ready: Callable[[], bool]) -> None:
    for observer in watching:
        observer.waiting(ready)


def woke(thread: threading.Thread) -> None:
    for observer in watching:
        observer.woke(thread)


def ending() -> None:
    for observer in watching:
        observer.ending()


def verify() -> None:
    for observer in watching:
        observer.verify()


class Lock:
    """A lock whose holder may tell of things; whoever waits for it says so. Reentrant.

    hands_over: whether what one holder has done is for the next one. Otherwise the lock keeps
    bookkeeping whole, and nobody shall rely on it for more.
    """

    __slots__ = ("__weakref__", "_hands_over", "_holds", "_lock", "_owner")

    def __init__(self, *, hands_over: bool = False) -> None:
        self._hands_over = hands_over
        self._lock = threading.RLock()
        self._owner = 0
        self._holds = 0

    def __enter__(self) -> None:
        if watching:
            me = threading.get_ident()
            waiting(lambda: not self._holds or self._owner == me)
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._holds += 1
        if self._hands_over and watching:
            took(self)

    def __exit__(self, *exception: object) -> None:
        if self._hands_over and watching:
            gave(self)
        self._holds -= 1
        self._lock.release()
