"""Phases: where the time of a step goes, for each replica, and who waits for whom.

A moment of a replica belongs to the innermost span that has a phase:

    forward, backward    what a tape records; the walk back
    waiting              at a meeting, until the last replica comes; at the end of a run, until the
                         last one returns; for its turn; for other ranks
    reduce               gradients, and other values, are summed; or sums are waited for
    update               the optimizer's arithmetic
    staging              copies: into and out of staging areas, and variables that are fetched
    input                the program waits for a batch
    other                everything else

While the last to come to a meeting runs the merge function, it does so for all: what it does counts
for each replica. So the phases of a replica add up to the step's duration.

Three more figures:

    own       what a replica has spent in its function but for waiting and merging; `behind` is that
              minus the fastest replica's
    hidden    the share of communication (sums, copies, fetches) that went on in a stream while some
              replica was computing (forward, backward, update). What a replica's own thread
              communicates is never hidden: it costs that replica its time. With GPUs it is
              their compute streams that compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from minidist.trace.recording import Recording, Span, Window, by_lane

PHASES = (*("forward", "backward", "waiting", "reduce", "update", "staging", "input", "other"),)
_PHASE_OF = {
    "forward": "forward",
    "backward": "backward",
    "wait": "waiting",
    "turn": "waiting",
    "peers": "waiting",
    "reduce": "reduce",
    "update": "update",
    "put": "staging",
    "get": "staging",
    "copy": "staging",
    "fetch": "staging",
    "input": "input",
    "merge": "other",
    "run": "other",
}
_COMPUTING = ("forward", "backward", "update")
_COMMUNICATION = ("reduce", "copy", "fetch")
_AWAY = ("wait", "turn", "merge")  # no time of a replica's own

Stretch = tuple[int, int]


@dataclass(frozen=True)
class OfReplica:
    """One replica's figures, in milliseconds per step.

    waited_for: by replica, how long this one waited for it.
    """

    replica: int
    device: str
    phases: dict[str, float]
    own: float
    behind: float
    waited_for: dict[int, float]


@dataclass(frozen=True)
class Phases:
    """Figures of some steps, in milliseconds per step; `phases` is the mean over the replicas.

    hidden_share is None where nothing was communicated.
    """

    steps: int
    step: float
    phases: dict[str, float]
    hidden_share: float | None
    replicas: Sequence[OfReplica]

    def json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "steps": self.steps,
            "step": self.step,
            "phases": self.phases,
            "hidden_share": self.hidden_share,
            "replicas": [
                {
                    "replica": each.replica,
                    "device": each.device,
                    "phases": each.phases,
                    "own": each.own,
                    "behind": each.behind,
                    "waited_for": {str(who): ms for who, ms in each.waited_for.items()},
                }
                for each in self.replicas
            ],
        }


def phases(recording: Recording) -> Phases | None:
    """Return the figures of all steps of a recording; None where there are none with replicas."""
    windows = recording.windows()
    found = _Found(recording)
    shares: dict[int, _Share] = {}
    for window in windows:
        for replica, share in found.step(window).items():
            shares.setdefault(replica, _Share(share.device)).add(share)
    if not shares:
        return None
    per = 1 / (1e6 * len(windows))  # from nanoseconds in all to milliseconds per step
    own = {replica: share.own * per for replica, share in shares.items()}
    replicas = [
        OfReplica(
            replica,
            share.device,
            {name: share.phases[name] * per for name in PHASES},
            own[replica],
            own[replica] - min(own.values()),
            {who: ns * per for who, ns in sorted(share.waited_for.items())},
        )
        for replica, share in sorted(shares.items())
    ]
    return Phases(
        len(windows),
        sum(window.end - window.start for window in windows) * per,
        {name: sum(each.phases[name] for each in replicas) / len(replicas) for name in PHASES},
        found.hidden_share(windows),
        replicas,
    )


class _Share:
    """What one replica has spent, in nanoseconds."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.phases: dict[str, int] = defaultdict(int)
        self.waited_for: dict[int, int] = defaultdict(int)
        self.own = 0

    def add(self, other: _Share) -> None:
        self.own += other.own
        for name, ns in other.phases.items():
            self.phases[name] += ns
        for who, ns in other.waited_for.items():
            self.waited_for[who] += ns

    def wait(self, start: int, end: int, whom: int | None) -> None:
        """Count a wait, if it took any time."""
        if end > start:
            self.phases["waiting"] += end - start
            if whom is not None:
                self.waited_for[whom] += end - start


class Segment(NamedTuple):
    """A stretch of a lane and the innermost span with a phase in it, None where there is none."""

    start: int
    end: int
    span: Span | None


class _Found:
    """The spans of a recording, looked up."""

    def __init__(self, recording: Recording) -> None:
        self.lanes = recording.lanes
        self._rows = by_lane(recording.spans, len(recording.lanes))
        self._segments = [list(segments(row)) for row in self._rows]
        self._merges = {_meeting(span): span for span in recording.spans if span.kind == "merge"}
        self._replicas: dict[int, list[Span]] = defaultdict(list)  # by run
        for span in recording.spans:
            if span.kind == "replica":
                self._replicas[span.about["run"]].append(span)

    def step(self, window: Window) -> dict[int, _Share]:
        """Return what each replica has spent in one step."""
        shares: dict[int, _Share] = {}
        runs = [
            span
            for span in self._between(window.lane, window.start, window.end)
            if span.kind == "run" and window.start <= span.start and span.end <= window.end
        ]
        ran = [(run, self._replicas.get(run.about["run"], [])) for run in runs]
        for _, spans in ran:
            for span in spans:
                shares.setdefault(span.about["replica"], _Share(span.about["device"]))
        for replica, share in shares.items():
            at = window.start
            for run, spans in ran:
                own = [span for span in spans if span.about["replica"] == replica]
                if own:
                    (span,) = own
                    last = max(spans, key=lambda span: span.end)
                    self._count(share, window.lane, at, span.start)
                    self._replica(share, span)
                    share.wait(span.end, last.end, last.about["replica"])
                    self._count(share, window.lane, last.end, run.end)
                    at = run.end
            self._count(share, window.lane, at, window.end)
        return shares

    def _count(self, share: _Share, lane: int, start: int, end: int) -> None:
        """Count what a lane does in a stretch."""
        for segment in self._cut(lane, start, end):
            share.phases[_phase(segment.span)] += segment.end - segment.start

    def _replica(self, share: _Share, whole: Span) -> None:
        for segment in self._cut(whole.lane, whole.start, whole.end):
            start, end, span = segment
            if span is None or span.kind != "wait":
                if span is not None and span.kind == "turn":
                    share.wait(start, end, None)
                else:
                    share.phases[_phase(span)] += end - start
                continue
            merge = self._merges.get(_meeting(span))
            if merge is None:
                share.wait(start, end, None)
                continue
            who = merge.about["replica"]
            begun, ended = max(start, min(end, merge.start)), min(end, max(start, merge.end))
            share.wait(start, begun, who)
            self._count(share, merge.lane, begun, ended)
            share.wait(ended, end, who)
        away = [
            (span.start, span.end)
            for span in self._between(whole.lane, whole.start, whole.end)
            if span.kind in _AWAY
        ]
        share.own += whole.end - whole.start - length(union(away))

    def hidden_share(self, windows: Sequence[Window]) -> float | None:
        """Return the share of all communication in the windows that was hidden."""
        computing = self._computing()
        steps = union((window.start, window.end) for window in windows)
        total = hidden = 0
        for lane, row in zip(self.lanes, self._rows, strict=True):
            spans = ((span.start, span.end) for span in row if span.kind in _COMMUNICATION)
            communication = common(union(spans), steps)
            total += length(communication)
            if lane.role == "stream":
                hidden += length(common(communication, computing))
        return hidden / total if total else None

    def _computing(self) -> list[Stretch]:
        """Return when replicas were computing, or their GPUs, to which they only give work."""
        by_gpus = union(
            (span.start, span.end) for row in self._rows for span in row if span.kind == "work"
        )
        return by_gpus or union(
            (segment.start, segment.end)
            for lane, row in zip(self.lanes, self._segments, strict=True)
            if lane.role == "replica"
            for segment in row
            if _phase(segment.span) in _COMPUTING
        )

    def _between(self, lane: int, start: int, end: int) -> Iterator[Span]:
        """Give the spans of a lane that begin in a stretch."""
        row = self._rows[lane]
        for i in range(bisect_left(row, start, key=lambda span: span.start), len(row)):
            if row[i].start >= end:
                return
            yield row[i]

    def _cut(self, lane: int, start: int, end: int) -> Iterator[Segment]:
        """Give all of a stretch of a lane in segments."""
        row = self._segments[lane]
        at = start
        for i in range(bisect_left(row, start, key=lambda segment: segment.end), len(row)):
            segment = row[i]
            if segment.start >= end:
                break
            if segment.start > at:
                yield Segment(at, segment.start, None)
            first, at = max(at, segment.start), min(end, segment.end)
            if at > first:
                yield Segment(first, at, segment.span)
        if end > at:
            yield Segment(at, end, None)


def segments(row: Sequence[Span]) -> Iterator[Segment]:
    """Give a lane's stretches that have a phase, in order; `row` as `by_lane` gives it."""
    open_spans: list[Span] = []
    at = 0

    def until(moment: int) -> Iterator[Segment]:
        nonlocal at
        while open_spans:
            inner = open_spans[-1]
            end = min(moment, inner.end)
            if end > at:
                yield Segment(at, end, inner)
                at = end
            if inner.end > moment:
                return
            open_spans.pop()

    for span in row:
        if _phase(span, "") == "":
            continue
        yield from until(span.start)
        at = span.start
        open_spans.append(span)
    yield from until(max((span.end for span in open_spans), default=0))


def _phase(span: Span | None, default: str = "other") -> str:
    if span is None:
        return default
    if span.kind == "await":  # for a stream
        return "reduce" if span.about["role"] == "communication" else "staging"
    return _PHASE_OF.get(span.kind, default)


def _meeting(span: Span) -> tuple[int, int]:
    return span.about["run"], span.about["meeting"]


# --- stretches of time --------------------------------------------------------------------------


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the same time as stretches that are in order and do not overlap."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def common(some: Sequence[Stretch], others: Sequence[Stretch]) -> list[Stretch]:
    """Return the time that is in both of two unions."""
    edges = sorted({moment for stretch in (*some, *others) for moment in stretch})
    shared: list[Stretch] = []
    i = k = 0
    for start, end in pairwise(edges):
        while i < len(some) and some[i][1] <= start:
            i += 1
        while k < len(others) and others[k][1] <= start:
            k += 1
        if i < len(some) and k < len(others) and some[i][0] <= start and others[k][0] <= start:
            shared.append((start, end))
    return shared


def length(stretches: Iterable[Stretch]) -> int:
    """Return how long stretches are together."""
    return sum(end - start for start, end in stretches)
