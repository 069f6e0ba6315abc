"""Staleness: how old gradients are when they are applied.

A variable's age counts its changes. That of a gradient is how often the variable has changed
between the replica's reading what the gradient comes from and its being applied:

    strong policies, independent     0
    parameter_server, staged_vars    1, but for the first step
    replicated, relaxed              1; the zeros of the first step are no gradients

A replica's gradient is taken to come from what the replica has read last.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextlib import AbstractContextManager
from typing import Any

from minidist import observe

MANY = 10_000  # what is heard is counted at the latest then
BAR = 40  # characters


class Staleness(observe.Observer):
    """A histogram of ages while a with statement lasts, in all of the process.

    Several with statements, one after the other, add up.
    `histogram` has for each age how often it occurred: once in each update for each variable and
    each replica that brought a gradient of it. A replica without an example has no gradients, nor
    has one that has read nothing since somebody began to watch.
    """

    def __init__(self) -> None:
        self._heard: deque[int] = deque()  # and not yet counted
        self._ages: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._watching: AbstractContextManager[None] | None = None

    def __enter__(self) -> Staleness:
        watching = observe.attached(self)
        watching.__enter__()
        self._watching = watching
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._watching is not None
        self._watching.__exit__(*exception)

    @property
    def histogram(self) -> dict[int, int]:
        """How often each age occurred, from the lowest age."""
        self._count()
        with self._lock:
            return dict(sorted(self._ages.items()))

    def applied(self, variable: str, replica: int, age: int) -> None:
        self._heard.append(age)  # which takes no lock
        if len(self._heard) > MANY:
            self._count()

    def _count(self) -> None:
        with self._lock:
            while self._heard:
                self._ages[self._heard.popleft()] += 1

    def __str__(self) -> str:
        return "\n".join(bars(self.histogram)) or "nothing was applied"


def bars(histogram: dict[int, int]) -> list[str]:
    """Return a line of text for each age: the age, a bar, and how often it occurred."""
    most = max(histogram.values(), default=1)
    return [
        f"{age:>3} {'█' * max(1, round(BAR * count / most)):<{BAR}} {count:,}"
        for age, count in histogram.items()
    ]
