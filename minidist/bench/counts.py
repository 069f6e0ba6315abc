"""Counts: what the measured steps have moved from device to device, and how old gradients were.

Both are counted in the very steps that are timed, of which they take some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from minidist.bench.flags import Flags
from minidist.instruments.bytes import Bytes, per_step
from minidist.instruments.staleness import Staleness, bars
from minidist.nn import Layer
from minidist.strategy import Strategy


class Counts:
    """The two instruments around the measured steps, and what the policy predicts."""

    def __init__(self, flags: Flags, strategy: Strategy, model: Layer) -> None:
        self._flags = flags
        self._strategy = strategy
        self._model = model
        self._bytes = Bytes(strategy)
        self._staleness = Staleness()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within a with statement, of which there may be several, one after the other."""
        with self._bytes, self._staleness:
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Return a with statement's way to do what belongs to no step."""
        return self._bytes.paused()

    @property
    def predicted(self) -> dict[str, float] | None:
        """Bytes per step by link, as the policy predicts them; None where nothing is trained."""
        if self._flags.forward_only:
            return None
        runs = self._flags.gradient_accumulation_steps
        traffic = self._strategy.variable_mgr.predicted_bytes(self._model.variables, runs=runs)
        return {link: per_step(traffic[link], runs) for link in sorted(traffic)}

    def json(self) -> dict[str, Any]:
        """Return the fields of a run's JSON."""
        if not self._bytes.steps:
            return {"bytes": None, "staleness": None}
        moved = {
            "predicted": self.predicted,
            "measured": self._bytes.measured,
            "input": self._bytes.input,
        }
        ages = {str(age): count for age, count in self._staleness.histogram.items()}
        return {"bytes": moved, "staleness": {"histogram": ages}}


def lines(results: Mapping[str, Any]) -> list[str]:
    """Return what a report says of the counts."""
    if results["bytes"] is None:
        return []
    predicted, measured = results["bytes"]["predicted"], results["bytes"]["measured"]
    links = sorted({*measured, *(predicted or {})})
    said = [f"{'Bytes per step':<20}{'predicted':>16}{'measured':>16}"]
    for link in links:
        known = "-" if predicted is None else f"{predicted.get(link, 0):,.0f}"
        said.append(f"  {link:<18}{known:>16}{measured.get(link, 0):>16,.0f}")
    if not links:
        said = ["Bytes per step: none, nothing moves from device to device"]
    histogram = results["staleness"]["histogram"]
    ages = bars({int(age): count for age, count in histogram.items()})
    return said + (["Age of gradients, in updates", *ages] if ages else [])


def bytes_cell(results: Mapping[str, Any]) -> str:
    """Return how much a run has moved in a step, over all links."""
    return "-" if results["bytes"] is None else short(sum(results["bytes"]["measured"].values()))


def staleness_cell(results: Mapping[str, Any]) -> str:
    """Return the ages of a run's gradients: the only one, or the lowest and the highest."""
    ages = sorted(map(int, results["staleness"]["histogram"])) if results["staleness"] else []
    return "-" if not ages else " … ".join(map(str, dict.fromkeys((ages[0], ages[-1]))))


def short(nbytes: float) -> str:
    """Return a number of bytes with at most three digits before its unit, a power of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
