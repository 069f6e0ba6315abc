"""Summaries as lines of JSON, each of which stands for itself.

    {"step": 7, "tag": "loss", "value": 0.25}
    {"step": 7, "tag": "kernel", "histogram": {"count": 100, "nonfinite": 0, "min": -1.5, …}}

A number that is not finite is written as a string, "nan", "inf" or "-inf", as JSON has none for it.
"""

from __future__ import annotations

import json
import math

from minidist.summary.base import SummaryFile
from minidist.summary.histogram import Histogram


class JsonLines(SummaryFile):
    """A line for each number and each histogram, in the order in which they come."""

    def scalar(self, step: int, tag: str, value: float) -> None:
        self._line({"step": step, "tag": tag, "value": _plain(value)})

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        statistics = {name: _plain(value) for name, value in histogram.statistics.items()}
        self._line({"step": step, "tag": tag, "histogram": statistics})

    def _line(self, said: dict[str, object]) -> None:
        self._put(json.dumps(said).encode() + b"\n")

    def _kept(self, old: bytes, resume_from: int | None) -> bytes:
        lines = old.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if resume_from is None:
            return b"".join(lines)
        return b"".join(line for line in lines if not _later(line, resume_from))


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _later(line: bytes, than: int) -> bool:
    """Whether a line is ours and of a later step."""
    try:
        said = json.loads(line)
    except ValueError:
        return False
    step = said.get("step") if isinstance(said, dict) else None
    return isinstance(step, int) and step > than
