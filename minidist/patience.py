"""Patience: how long anything waits for a peer, unless it is told otherwise."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from minidist import observe
from minidist.errors import HangError

log = logging.getLogger("minidist")

REPORT_AFTER = 5.0  # seconds after which a peer that does not come is reported
DEADLINE = 60.0  # seconds after which that is an error; of a run, or ten times the longest so far
TICK = 0.05  # seconds between two looks of a waiting thread at signals and deadlines


def stack(thread: threading.Thread) -> str:
    """Return where a thread is now, for an error that names it."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame else "  (it has ended)"


class Reached(Protocol):
    """A number that grows, such as a Fence."""

    @property
    def value(self) -> int: ...

    def wait(self, target: int, timeout: float) -> bool: ...


class Waiting:
    """One wait, from now on: in ticks, between which Python handles signals.

    After `report_after` seconds what is waited for is logged, after `deadline` it is a HangError.
    """

    __slots__ = ("_deadline", "_report_after", "_since")

    def __init__(self, report_after: float, deadline: float) -> None:
        self._report_after, self._deadline = report_after, deadline
        self._since = time.monotonic()

    def left(self) -> float:
        """Return the seconds to the deadline, or 0."""
        return max(0.0, self._since + self._deadline - time.monotonic())

    def tick(self, fence: Reached, target: int, what: Callable[[], str]) -> None:
        """Wait a little for a fence; `what` says what is not going on, in a sentence."""
        if observe.watching:
            observe.waiting(lambda: fence.value >= target)
        if fence.wait(target, min(TICK, self.left())):
            return
        waited = time.monotonic() - self._since
        if waited < min(self._report_after, self._deadline):
            return
        report = f"for {waited:.1f} s (the deadline is {self._deadline:g} s) {what()}"
        if waited >= self._deadline:
            raise HangError(report)
        self._report_after = math.inf  # once
        log.warning("%s", report)
