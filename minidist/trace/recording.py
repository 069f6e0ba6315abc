"""Recording: what a timeline has heard: lanes of spans and ticks, and the steps they belong to.

A *lane* is a thread: a replica's, a stream's, the one that reads input ahead, the program's. A
*span* is something that took time in a lane; those of one lane nest. A *tick* took none. An *arrow*
leads from a moment in one lane to one that it made possible. A *window* is a step: what the
program says is one (spans "step"), or else a run with the input that was taken for it.

Times are whole nanoseconds of one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

About = dict[str, Any]


@dataclass(slots=True, eq=False)
class Span:
    """Something that took time. `lane` is a number in the recording's list."""

    lane: int
    kind: str
    name: str
    start: int
    end: int
    about: About = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Tick:
    """Something that took no time."""

    lane: int
    kind: str
    name: str
    at: int
    about: About = field(default_factory=dict)


class Lane(NamedTuple):
    """A thread: what it is called, and what it is: "replica", "stream", "reader" or "program"."""

    label: str
    role: str


class Arrow(NamedTuple):
    """From a moment of one lane to a later one, mostly of another lane."""

    kind: str
    lane: int
    at: int
    to_lane: int
    to: int


class Window(NamedTuple):
    """A step: when it began and ended, its number, and the lane of the program that made it."""

    start: int
    end: int
    step: int
    lane: int


@dataclass(frozen=True)
class Recording:
    """What was heard. Spans and ticks are in the order of their times."""

    lanes: Sequence[Lane]
    spans: Sequence[Span]
    ticks: Sequence[Tick] = ()
    arrows: Sequence[Arrow] = ()
    complete_from: int = 0  # before this, spans may be missing

    def windows(self) -> list[Window]:
        """Return the steps that are there as a whole, in order."""
        steps = [span for span in self.spans if span.kind == "step"]
        found = [Window(s.start, s.end, s.about.get("step", 0), s.lane) for s in steps]
        if not steps:
            found = self._runs()
        return [window for window in found if window.start >= self.complete_from]

    def _runs(self) -> list[Window]:
        found: list[Window] = []
        last_end: dict[int, int] = {}
        all_inputs = [span for span in self.spans if span.kind == "input"]
        for span in self.spans:
            if span.kind != "run" or self.lanes[span.lane].role == "replica":
                continue  # a replica's lane has the runs that merge functions make
            since = last_end.get(span.lane, 0)
            inputs = [
                each.start
                for each in all_inputs
                if each.lane == span.lane and since <= each.start <= span.start
            ]
            start = min([span.start, *inputs])
            found.append(Window(start, span.end, span.about.get("step", 0), span.lane))
            last_end[span.lane] = span.end
        return found

    def last(self, steps: int) -> Recording:
        """Return what was heard during the last so many steps; all of it where there is none."""
        windows = self.windows()[-steps:]
        if not windows:
            return self
        start = min(window.start for window in windows)
        end = max(window.end for window in windows)
        return Recording(
            self.lanes,
            [
                replace(span, start=max(start, span.start), end=min(end, span.end))
                for span in self.spans
                if span.start < end and span.end > start
            ],
            [tick for tick in self.ticks if start <= tick.at <= end],
            [arrow for arrow in self.arrows if start <= arrow.at and arrow.to <= end],
            start,
        )


def by_lane(spans: Sequence[Span], lanes: int) -> list[list[Span]]:
    """Return the spans of each lane, outer ones before those inside."""
    rows: list[list[Span]] = [[] for _ in range(lanes)]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        rows[span.lane].append(span)
    return rows
