"""Timeline: an observer that writes down when everything began and ended, thread by thread.

Each thread writes into a buffer of its own, without a lock; a full buffer forgets its oldest
entries, so that memory stays bounded however long a program is watched. What a GPU's streams are
given (pieces.py) is known by moments of theirs; when these were is asked for at the end.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any

from minidist import observe
from minidist.trace.arrows import arrows
from minidist.trace.pieces import Piece, Pieces
from minidist.trace.recording import Lane, Recording, Span, Tick

ENTRIES = 30_000  # of a thread: some 10 MB

# An entry is a list: kind, name, about, start, end; ticks have no end, open spans 0.
_Entry = list[Any]


class Timeline(observe.Observer):
    """Hears spans, ticks, and what orders threads. `entries`: how many of a thread are kept."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._local = threading.local()
        self._buffers: list[tuple[str, deque[_Entry]]] = []  # with the threads' names
        self._pieces = Pieces(entries)

    def attached(self) -> AbstractContextManager[None]:
        """Watch for the length of a with statement."""
        return observe.attached(self)

    def _buffer(self) -> deque[_Entry]:
        try:
            buffer: deque[_Entry] = self._local.buffer
        except AttributeError:
            buffer = self._local.buffer = deque(maxlen=self._entries)
            self._buffers.append((threading.current_thread().name, buffer))
        return buffer

    # --- what is heard

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> _Entry:
        entry = [kind, name, about, perf_counter_ns(), 0]
        try:  # as `_buffer` does, but sooner
            self._local.buffer.append(entry)
        except AttributeError:
            self._buffer().append(entry)
        return entry

    def end(self, token: _Entry) -> None:
        token[4] = perf_counter_ns()

    def tick(self, kind: str, name: str, about: dict[str, Any]) -> None:
        self._buffer().append([kind, name, about, perf_counter_ns()])

    def recorded(self, event: Any) -> None:
        self.tick("recorded", _name(event), {})

    def waited(self, event: Any) -> None:
        self.tick("waited", _name(event), {})

    def giving(
        self, stream: Any, what: str, reads: Sequence[Any], writes: Sequence[Any]
    ) -> Piece | None:
        return self._pieces.begin(stream, what)

    def given(self, token: Piece | None) -> None:
        if token is not None:
            self._pieces.add(token)

    def followed(self, stream: Any, event: Any) -> None:
        self._pieces.follow(stream, event)

    def put(self, slot: Any) -> None:
        self.tick("put", str(id(slot)), {})

    def got(self, slot: Any) -> None:
        self.tick("got", str(id(slot)), {})

    def arrived(self, run: Any, replica: int, meeting: int) -> None:
        about = {"run": run.number, "replica": replica, "meeting": meeting}
        self.tick("arrived", f"replica {replica} at meeting {meeting}", about)

    # --- what was heard

    def recording(self) -> Recording:
        """Return what is there now. Spans that still go on end now."""
        now = perf_counter_ns()
        complete_from = 0
        lanes: list[Lane] = []
        spans: list[Span] = []
        ticks: list[Tick] = []
        buffers = [(_lane(name, buffer), list(buffer)) for name, buffer in list(self._buffers)]
        for lane, entries in sorted(buffers, key=lambda pair: (_ORDER[pair[0].role], pair[0])):
            if not entries:
                continue
            number = len(lanes)
            lanes.append(_another(lane, lanes))
            if len(entries) == self._entries:
                complete_from = max(complete_from, entries[0][3])
            for entry in entries:
                if len(entry) == 4:
                    ticks.append(Tick(number, entry[0], entry[1], entry[3], entry[2]))
                else:
                    kind, name, about, start, end = entry
                    spans.append(Span(number, kind, name, start, end or now, about))
        beside = self._pieces.found(len(lanes))
        lanes += beside.lanes
        spans += beside.spans
        complete_from = max(complete_from, beside.complete_from)
        spans.sort(key=lambda span: (span.start, -span.end))
        ticks.sort(key=lambda tick: tick.at)
        drawn = sorted([*arrows(spans, ticks), *beside.arrows], key=lambda arrow: arrow.at)
        return Recording(lanes, spans, ticks, drawn, complete_from)


_ORDER = {"program": 0, "reader": 1, "replica": 2, "stream": 3}


def _name(event: Any) -> str:
    return f"{event.stream.device.short} {event.stream.role} {event.position}"


def _lane(thread: str, buffer: deque[_Entry]) -> Lane:
    """Return what a thread is, by what it has done or by its name."""
    replicas = Counter(
        f"replica {entry[2]['replica']} ({entry[2]['device']})"
        for entry in list(buffer)
        if entry[0] == "replica"
    )
    if replicas:
        return Lane(replicas.most_common(1)[0][0], "replica")
    if thread.endswith(" stream"):
        return Lane(thread.removeprefix("minidist "), "stream")
    if thread.startswith("minidist reader"):
        return Lane("reads input ahead", "reader")
    return Lane("the program" if thread == "MainThread" else thread, "program")


def _another(lane: Lane, lanes: list[Lane]) -> Lane:
    """Return a lane whose label is not yet taken."""
    taken = {each.label for each in lanes}
    label, number = lane.label, 2
    while label in taken:
        label, number = f"{lane.label}, thread {number}", number + 1
    return Lane(label, lane.role)
