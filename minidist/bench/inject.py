"""Inject: faults that are planted on purpose, to see what a policy makes of them.

    slow:REPLICA:FACTOR   that replica's forward and backward passes take FACTOR times as long
    fail:REPLICA:STEP     that replica raises in that step of the rows

A slow replica waits, in its own time and after what it has really computed: so would a device that
is slower, and no core is taken from the others. What it waits for itself, at meetings, is not made
longer. Faults are planted in the steps that are measured, not in those of a warm-up or evaluation.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from minidist import context, observe
from minidist.errors import InjectedError

FORM = "slow:REPLICA:FACTOR or fail:REPLICA:STEP, several with commas between them"
MOST = 1000.0  # times as long


@dataclass(frozen=True)
class Fault:
    """What is to go wrong in a replica: `amount` is the factor, or the step from 1."""

    kind: str
    replica: int
    amount: float

    @classmethod
    def parse(cls, text: str) -> tuple[Fault, ...]:
        """Return the faults of a text. Raises ValueError for another form."""
        return tuple(cls._one(part) for part in text.split(","))

    @classmethod
    def _one(cls, text: str) -> Fault:
        kind, replica, amount = text.split(":")
        fault = cls(kind, int(replica), float(amount) if kind == "slow" else int(amount))
        good = {"slow": 1 <= fault.amount <= MOST, "fail": 1 <= fault.amount < math.inf}
        if fault.replica < 0 or not good.get(kind, False):
            raise ValueError(text)
        return fault

    def __repr__(self) -> str:
        return f"{self.kind}:{self.replica}:{self.amount:g}"


class Faults(observe.Observer):
    """Plants faults where replicas tell what they do. `step` is the step that goes on, or None."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._factors = {each.replica: each.amount for each in faults if each.kind == "slow"}
        self._failures = {(each.replica, each.amount) for each in faults if each.kind == "fail"}
        self._own = _Own()
        self.step: int | None = None

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> float | None:
        """Raise InjectedError where a replica begins that is to fail."""
        own = self._own
        if kind == "replica":
            replica = context.frame().replica_id  # among those of all workers
            own.factor = self._factors.get(replica, 1.0) if self.step is not None else 1.0
            own.depth = 0
            if (replica, self.step) in self._failures:
                raise InjectedError(
                    f"replica {replica} was made to fail in step {self.step}, by --inject"
                )
        elif own.factor > 1:
            if kind in ("forward", "backward"):
                own.depth += 1
                if own.depth == 1:
                    own.waited = 0.0
                return time.perf_counter()
            if kind in ("wait", "merge", "turn") and own.depth:
                return -time.perf_counter()
        return None

    def end(self, token: float | None) -> None:
        """Wait, after a pass of a replica that is to be slow."""
        own = self._own
        if token is None:
            return
        if token < 0:
            own.waited += time.perf_counter() + token
            return
        own.depth -= 1
        if own.depth == 0:
            with observe.span("injected", "made slow by --inject"):
                time.sleep((own.factor - 1) * (time.perf_counter() - token - own.waited))


class _Own(threading.local):
    """What a thread's replica is made to do."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.depth = 0  # passes within each other
        self.waited = 0.0  # seconds of the outermost one that it has waited for others
