"""Arrows: what made what possible, joined from what was heard.

put       an item put into a staging area    → where it is taken
event     the record of a stream's event     → where somebody has waited for it
gradient  a replica's gradient, final        → the sum that takes it up, or its update
sum       a sum of gradients                 → the updates that apply it
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from minidist.trace.recording import Arrow, Span, Tick

_Given = dict[tuple[int, int, str], list[Tick]]  # by lane, step and variable
_PAIRS = {"got": ("put", "put"), "waited": ("recorded", "event")}


def arrows(spans: Sequence[Span], ticks: Sequence[Tick]) -> list[Arrow]:
    """Return all arrows, in the order of where they begin. Spans and ticks are in order."""
    found = [*_handed_over(ticks), *_gradients(spans, ticks)]
    return sorted(found, key=lambda arrow: arrow.at)


def _handed_over(ticks: Sequence[Tick]) -> Iterable[Arrow]:
    last: dict[tuple[str, str], Tick] = {}
    drawn: set[tuple[int, int]] = set()  # what was waited for may be waited for again
    for tick in ticks:
        if tick.kind in ("put", "recorded"):
            last[tick.kind, tick.name] = tick
        elif tick.kind in _PAIRS:
            before, kind = _PAIRS[tick.kind]
            source = last.get((before, tick.name))
            if source is not None and (id(source), tick.lane) not in drawn:
                drawn.add((id(source), tick.lane))
                yield Arrow(kind, source.lane, source.at, tick.lane, tick.at)


def _gradients(spans: Sequence[Span], ticks: Sequence[Tick]) -> Iterable[Arrow]:
    given = _given(spans, ticks)
    lanes = sorted({lane for lane, _, _ in given})
    sums: dict[tuple[int, str], list[Span]] = defaultdict(list)  # by step and variable
    for span in spans:
        if span.kind == "reduce" and "variables" in span.about:
            for name in span.about["variables"]:
                sums[span.about["step"], name].append(span)
            for lane in lanes:
                yield from _last(given, lane, span)
        elif span.kind == "update" and "variables" in span.about:
            before = {
                id(each): each
                for name in span.about["variables"]
                for each in sums.get((span.about["step"], name), ())
            }
            for each in before.values():
                yield Arrow("sum", each.lane, _inside(each), span.lane, _within(span, each.end))
            if not before:
                for lane in lanes if "replicas" in span.about else [span.lane]:
                    yield from _last(given, lane, span)


def _given(spans: Sequence[Span], ticks: Sequence[Tick]) -> _Given:
    """Return the gradients of each lane by step and variable."""
    given: _Given = defaultdict(list)
    replicas: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "replica":
            replicas[span.lane].append(span)
    for tick in ticks:
        if tick.kind == "gradient":
            runs = replicas[tick.lane]
            place = bisect_right(runs, tick.at, key=lambda span: span.start)
            step = runs[place - 1].about["step"] if place else 0
            given[tick.lane, step, tick.name].append(tick)
    return given


def _last(given: _Given, lane: int, span: Span) -> Iterable[Arrow]:
    """Give the arrow from the last of a lane's gradients that a span takes up."""
    latest: Tick | None = None
    for name in span.about["variables"]:
        of_name = given.get((lane, span.about["step"], name), [])
        place = bisect_right(of_name, span.start, key=lambda tick: tick.at)
        if place and (latest is None or of_name[place - 1].at > latest.at):
            latest = of_name[place - 1]
    if latest is not None:
        yield Arrow("gradient", lane, latest.at, span.lane, span.start)


def _inside(span: Span) -> int:
    """Return the last moment that is inside a span."""
    return max(span.start, span.end - 1)


def _within(span: Span, at: int) -> int:
    """Return the moment inside a span that is nearest to another one."""
    return min(max(span.start, at), _inside(span))
