"""Bytes: what moves from device to device in a step, counted where it is moved.

What a policy moves for variables and gradients it can predict from their shapes
(VariableMgr.predicted_bytes): `measured` is to be held against that. Everything else is counted
apart.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from minidist import observe
from minidist.device import host
from minidist.patience import DEADLINE
from minidist.strategy import Strategy

MANY = 10_000  # what is heard is added up at the latest then
POLICY = ("reads", "sums", "network")  # what a policy moves; see Observer.moved


class Bytes(observe.Observer):
    """Counts the bytes that move while a with statement lasts, by link and for what.

    Several with statements, one after the other, add up.
    All in the process count, also other strategies'. A step is one `run` of the given strategy. On
    entering and on leaving, the copies and sums that its devices still have to do are waited for,
    so that each step's are in it, also those that are done while the next one computes.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._heard: deque[tuple[str, str, str, int]] = deque()  # and not yet added up
        self._counts: Counter[tuple[str, str]] = Counter()  # by what, and by link
        self._batches: Counter[str] = Counter()  # by link
        self._lock = threading.Lock()
        self.steps = 0  # of the strategy, in the with statements that are over
        self._watching: AbstractContextManager[None] | None = None

    def __enter__(self) -> Bytes:
        self._synchronize()
        watching = observe.attached(self)
        watching.__enter__()
        self._watching = watching
        self.steps -= self._strategy.step
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._watching is not None
        if exception[0] is None:
            self._synchronize()
        self._watching.__exit__(*exception)
        self.steps += self._strategy.step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing, and no step, within another with statement inside the first."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _synchronize(self) -> None:
        for device in (*self._strategy.devices, host()):
            device.synchronize(DEADLINE)

    # --- what was counted

    @property
    def measured(self) -> dict[str, float]:
        """Bytes per step by link, "host->cpu:1": of variables that replicas read, and of sums.

        The sums are those of gradients, and those that a program takes itself by `reduce`. Whole
        numbers where all steps have moved the same.
        """
        return self._per_step(POLICY, max(1, self.steps))

    @property
    def input(self) -> dict[str, float]:
        """Bytes by link of one global batch: the mean of those that were placed.

        They are not counted by steps, since batches are placed ahead of the steps that use them.
        """
        self._add_up()
        with self._lock:
            return {
                link: per_step(self._counts["input", link], batches)
                for link, batches in sorted(self._batches.items())
            }

    @property
    def others(self) -> dict[str, dict[str, float]]:
        """Bytes per step by link of what is neither, by what it is: "values", "rows", "staging"."""
        self._add_up()
        kinds = {what for what, _ in self._counts} - {*POLICY, "input"}
        return {what: self._per_step((what,), max(1, self.steps)) for what in sorted(kinds)}

    def _per_step(self, kinds: tuple[str, ...], steps: int) -> dict[str, float]:
        self._add_up()
        total: Counter[str] = Counter()
        with self._lock:
            for (what, link), nbytes in self._counts.items():
                if what in kinds:
                    total[link] += nbytes
        return {link: per_step(total[link], steps) for link in sorted(total)}

    def __str__(self) -> str:
        lines = [f"{link:<20}{nbytes:>16,.0f}" for link, nbytes in self.measured.items()]
        return "\n".join(["bytes a step", *lines]) if lines else "nothing moves"

    # --- what is heard

    def moved(self, source: str, destination: str, nbytes: int, what: str) -> None:
        self._heard.append((source, destination, what, nbytes))  # which takes no lock
        if len(self._heard) > MANY:
            self._add_up()

    def _add_up(self) -> None:
        with self._lock:
            while self._heard:
                source, destination, what, nbytes = self._heard.popleft()
                link = f"{source}->{destination}"
                self._counts[what, link] += nbytes
                if what == "input":  # told once for each batch
                    self._batches[link] += 1


def per_step(nbytes: int, steps: int) -> float:
    """Return a quotient, a whole number where it is one."""
    whole, rest = divmod(nbytes, steps)
    return nbytes / steps if rest else whole
