"""Chrome's trace event format: what Perfetto and chrome://tracing open, and what our page draws.

Google's "Trace Event Format" describes it. A lane is a thread of one process, spans are complete
events (X, so none can lack its end), ticks instants (i), and each arrow is a flow of its own: a
start (s) inside a span and a finish (f) inside another. Times are microseconds from the first event
on, with three decimals.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidist.errors import DataError
from minidist.trace.phases import phases
from minidist.trace.recording import Arrow, Lane, Recording, Span, Tick
from minidist.trace.words import verdict

OURS = "minidist"  # the key of what only our own readers look at
MANY = 12  # names that an event lists
# What is raised of a file that has another form than ours.
MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_SHOWN = {"arrived", "gradient"}  # ticks that are events; the others are the ends of arrows
_TITLES = {
    "wait": "waits for {who}",
    "merge": "merge: {name}",
    "reduce": "reduce: {name}",
    "update": "update: {name}",
    "fetch": "fetch {name}",
    "gradient": "gradient of {name}",
    "run": "run {name}",
    "replica": "{name}",
    "stream": "work {about[position]}",
    "work": "{name}",
    "verb": "{name}",
    "await": "waits for the {name} stream",
    "turn": "waits for its turn",
    "peers": "waits for other ranks to {name}",
    "arrived": "{name}",
    "step": "step {about[step]}",
    "injected": "{name}",
}

Event = dict[str, Any]


def to_chrome(recording: Recording) -> dict[str, Any]:
    """Return a recording as an object of the format, ready for json.dumps."""
    times = [span.start for span in recording.spans] + [tick.at for tick in recording.ticks]
    zero = min(times, default=0)
    events: list[Event] = [_about("process_name", 0, name="minidist")]
    for number, lane in enumerate(recording.lanes):
        events.append(_about("thread_name", number, name=lane.label, role=lane.role))
        events.append(_about("thread_sort_index", number, sort_index=number))
    merged_by = {
        (span.about["run"], span.about["meeting"]): span.about["replica"]
        for span in recording.spans
        if span.kind == "merge"
    }
    for span in (*recording.spans, *_ends_of_runs(recording)):
        about = dict(span.about)
        if span.kind == "wait" and "for" not in about:
            about["for"] = merged_by.get((about["run"], about["meeting"]))
        event = _event("X", span.kind, _title(span, about), span.lane, span.start - zero)
        events.append({**event, "dur": (span.end - span.start) / 1000, "args": _short(about)})
    for tick in recording.ticks:
        if tick.kind in _SHOWN:
            event = _event("i", tick.kind, _title(tick, tick.about), tick.lane, tick.at - zero)
            events.append({**event, "s": "t", "args": tick.about})
    for number, arrow in enumerate(recording.arrows, 1):
        start = _event("s", arrow.kind, arrow.kind, arrow.lane, arrow.at - zero)
        finish = _event("f", arrow.kind, arrow.kind, arrow.to_lane, arrow.to - zero)
        events.append({**start, "id": number})
        events.append({**finish, "id": number, "bp": "e"})
    found = phases(recording)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        OURS: {
            "steps": [
                {"step": step, "start": (start - zero) / 1000, "end": (end - zero) / 1000}
                for start, end, step, _ in recording.windows()
            ],
            "phases": None if found is None else found.json(),
            "verdict": verdict(found),
        },
    }


def _ends_of_runs(recording: Recording) -> Iterator[Span]:
    """Give the waits at the ends of runs, of replicas that have returned before the last one."""
    runs: dict[int, list[Span]] = defaultdict(list)
    for span in recording.spans:
        if span.kind == "replica":
            runs[span.about["run"]].append(span)
    for spans in runs.values():
        last = max(spans, key=lambda span: span.end)
        for span in spans:
            if span.end < last.end:
                who = {key: span.about[key] for key in ("run", "replica")}
                about = {**who, "for": last.about["replica"]}
                yield Span(span.lane, "wait", "the end of the run", span.end, last.end, about)


def _event(ph: str, kind: str, name: str, lane: int, at: int) -> Event:
    return {"ph": ph, "cat": kind, "name": name, "pid": 1, "tid": lane + 1, "ts": at / 1000}


def _about(what: str, lane: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": 1, "tid": lane + 1, "args": args}


def _title(entry: Span | Tick, about: dict[str, Any]) -> str:
    who = about.get("for")
    who = "the others" if who is None else f"replica {who}"
    text = _TITLES.get(entry.kind, f"{entry.kind} {{name}}")
    if entry.kind in ("forward", "backward", "input", "copy", "put", "get", "read", "save"):
        return entry.kind
    return text.format(name=entry.name, who=who, about=about)


def _short(about: dict[str, Any]) -> dict[str, Any]:
    """Return it with only the first of many names."""
    names = about.get("variables", ())
    if len(names) <= MANY:
        return about
    return {**about, "variables": [*names[:MANY], f"… {len(names)} in all"]}


# --- reading ------------------------------------------------------------------------------------


def read(path: Path) -> Recording:
    """Return what a trace file holds, be it the format's JSON or a page with it inside.

    Titles stand for names. Raises DataError for a file that is missing or was not written by this
    package.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise DataError(f"{path} cannot be read as a trace: {why}") from None
    if inside := re.search(
        r'<script id="trace" type="application/json">(.*?)</script>', text, re.S
    ):
        text = inside[1]
    try:
        return _recording(json.loads(text))
    except MALFORMED:
        raise DataError(
            f"{path} is no trace of minidist; write one with --trace_file or md.trace, and do not "
            "save it anew with another program"
        ) from None


def _recording(trace: dict[str, Any]) -> Recording:
    if OURS not in trace:
        raise KeyError(OURS)
    lanes: dict[int, Lane] = {}
    spans, ticks, arrows = [], [], []
    starts: dict[int, tuple[int, int]] = {}
    for event in trace["traceEvents"]:
        ph, lane = event["ph"], event["tid"] - 1
        at = round(event.get("ts", 0) * 1000)
        if ph == "M" and event["name"] == "thread_name":
            lanes[lane] = Lane(event["args"]["name"], event["args"]["role"])
        elif ph == "X":
            end = at + round(event["dur"] * 1000)
            spans.append(Span(lane, event["cat"], event["name"], at, end, event["args"]))
        elif ph == "i":
            ticks.append(Tick(lane, event["cat"], event["name"], at, event["args"]))
        elif ph == "s":
            starts[event["id"]] = lane, at
        elif ph == "f":
            arrows.append(Arrow(event["cat"], *starts[event["id"]], lane, at))
    return Recording([lanes[number] for number in sorted(lanes)], spans, ticks, arrows)
