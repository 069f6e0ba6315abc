"""Clocks: what happened before what, by vector clocks (Mattern 1989).

An *actor* is a thread, or a stream, whichever thread does the stream's work. Each has its own time,
and a clock: for each actor the time up to which it has seen what that one did. Somebody's access at
a time was before this one if the clock of who makes this one has that time.

Clocks are never changed, only replaced, so a snapshot costs nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

Clock = dict[int, int]  # time by an actor's number
KEPT = 1024  # pieces of a stream's work whose clocks are kept


class Actor:
    """Who does something: a thread, or a stream."""

    __slots__ = ("clock", "name", "number", "time")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.time = 1
        self.clock: Clock = {number: 1}

    def give(self) -> Clock:
        """Return what others may take: all that was done so far, and nothing that is done later."""
        given = self.clock
        self.time += 1
        self.clock = {**given, self.number: self.time}
        return given

    def take(self, given: Clock | None) -> None:
        """See what others have given."""
        if given is not None:
            self.clock = joined(self.clock, given)


class StreamActor(Actor):
    """A stream. `position` is the number of the piece of work that it does."""

    __slots__ = ("_done", "_first", "position", "stream")

    def __init__(self, number: int, stream: Any) -> None:
        super().__init__(number, f"the {stream.role} stream of {stream.device.short}")
        self.stream = stream
        self.position = 0
        self._first = 0  # piece of which the end was heard
        self._done: deque[tuple[int, Clock]] = deque(maxlen=KEPT)

    def begin(self, position: int) -> None:
        self.position = position
        self.time = position << 32  # later than whatever is given in the pieces before
        self.clock = {**self.clock, self.number: self.time}

    def end(self, position: int) -> None:
        if not self._done:
            self._first = position
        self._done.append((position, self.clock))

    def after(self, position: int) -> Clock | None:
        """Return the clock at the end of a piece; None where nobody listened then.

        Of one that is too long ago to be known it is that of the first one after it that is.
        """
        if not self._done or position < self._first:
            return None
        oldest = self._done[0][0]
        return self._done[max(0, position - oldest)][1] if position <= self._done[-1][0] else None


def joined(a: Clock, b: Clock) -> Clock:
    """Return the later of two times for each actor."""
    later = {actor: time for actor, time in b.items() if time > a.get(actor, 0)}
    return {**a, **later} if later else a
