"""Pieces: the work of a GPU's streams, which threads give and which is done later.

A stream has a lane of its own. Where it waits for another one, an arrow leads from what that one
did last to what this one does next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any

from minidist.trace.recording import Arrow, Lane, Recording, Span

KINDS = {"compute": "work", "communication": "reduce"}  # the others copy


class Piece:
    """One piece of work, between two moments of its stream; `position` is its number there."""

    __slots__ = ("end", "position", "start", "stream", "what")

    def __init__(self, stream: Any, what: str) -> None:
        self.stream = stream
        self.what = what
        self.position: int = stream.next
        self.start = stream.moment()
        self.end: Any = None  # as long as it is being given


class Wait:
    """From here on a stream comes after another one's position."""

    __slots__ = ("position", "stream")

    def __init__(self, stream: Any, position: int) -> None:
        self.stream = stream
        self.position = position


class Pieces:
    """What streams were given, each up to so many entries: then the oldest are forgotten."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._given: dict[Any, deque[Piece | Wait]] = {}
        self._open: set[Any] = set()  # streams that are being given a piece

    def _of(self, stream: Any) -> deque[Piece | Wait]:
        try:
            return self._given[stream]
        except KeyError:
            return self._given.setdefault(stream, deque(maxlen=self._entries))

    def begin(self, stream: Any, what: str) -> Piece | None:
        """Return the piece that a stream is given from now on; None for a part of another one."""
        if stream in self._open:
            return None
        self._open.add(stream)
        return Piece(stream, what)

    def add(self, piece: Piece) -> None:
        """Write down a piece that has just been given."""
        piece.end = piece.stream.moment()
        self._open.discard(piece.stream)
        self._of(piece.stream).append(piece)

    def follow(self, stream: Any, event: Any) -> None:
        """Write down that a stream waits for an event of another one."""
        self._of(stream).append(Wait(event.stream, event.position))

    def found(self, lane: int) -> Recording:
        """Return the streams' lanes, of which the first gets this number, and what is in them.

        Waits for all that was given.
        """
        lanes: list[Lane] = []
        spans: dict[Any, list[Span]] = {}
        waits: list[tuple[Wait, Span]] = []
        complete_from = 0
        for stream, given in sorted(self._given.items(), key=_name):
            entries, when, row, before = list(given), stream.clock(), [], []
            for entry in entries:
                if isinstance(entry, Wait):
                    before.append(entry)
                    continue
                kind = KINDS.get(stream.role, "copy")
                about = {"position": entry.position}
                times = when(entry.start), when(entry.end)
                span = Span(lane + len(lanes), kind, entry.what, *times, about)
                row.append(span)
                waits += [(wait, span) for wait in before]
                before.clear()
            if row and len(entries) == self._entries:
                complete_from = max(complete_from, row[0].start)
            spans[stream] = row
            lanes.append(Lane(f"{stream.device.short} {stream.role} stream", "stream"))
        arrows = [arrow for wait, span in waits for arrow in _arrow(spans, wait, span)]
        return Recording(
            lanes, [span for row in spans.values() for span in row], (), arrows, complete_from
        )


def _name(item: tuple[Any, Any]) -> tuple[str, str]:
    stream = item[0]
    return stream.device.short, stream.role


def _arrow(spans: dict[Any, list[Span]], wait: Wait, span: Span) -> list[Arrow]:
    """Return the arrow to what waited, from the last piece that it waited for, if that is known."""
    row = spans.get(wait.stream, [])
    place = bisect_right(row, wait.position, key=lambda span: span.about["position"])
    if not place or row[place - 1].end > span.start:
        return []
    last = row[place - 1]
    return [Arrow("event", last.lane, max(last.start, last.end - 1), span.lane, span.start)]
