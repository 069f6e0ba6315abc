"""Fuzz: one thread at a time goes on, up to the next thing that it tells; a seed chooses which.

    with fuzz(seed):
        strategy.run(step)

Whatever is told to observers (an access, a wait, an arrival) is a point at which the thread that
tells it may have to let others go first. A thread that is about to wait says for what; it is chosen
again only when that is so, and so no wait is ever waited out, nothing sleeps, and a program without
threads of its own meets the same order for the same seed.

Where nobody can go on, or who has the turn does not come to another point for `PATIENCE` seconds
(it waits for something that minidist does not know), all are let go, and the rest is chance:
`let_go` says so. A failure gets a note with the seed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from minidist import observe
from minidist.checking.handovers import HAND_OVERS
from minidist.checking.verbs import VERBS
from minidist.kernels import heap

PATIENCE = 0.25


class _Thread:
    """A thread that takes turns. What it waits for, if it does, is `ready`."""

    __slots__ = ("go", "number", "ready")

    def __init__(self, number: int) -> None:
        self.number = number
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = _always


class fuzz(observe.Observer):
    """Let threads take turns for the length of a with statement; `order` is who had each turn.

    They are numbered as they come.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.let_go = False
        self.order: list[int] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._threads: dict[int, _Thread] = {}  # by ident, in the order in which they came
        self._count = 0  # threads that came
        self._turn: int | None = None

    def __enter__(self) -> fuzz:
        self._turn = threading.get_ident()
        self._came(self._turn)
        VERBS.begin()
        heap.poison(1)
        HAND_OVERS.begin()
        observe.attach(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._point(self._others_wait)  # streams may have work that nobody has waited for
        observe.detach(self)
        HAND_OVERS.end()
        heap.poison(-1)
        VERBS.end()
        with self._lock:
            self._let_all_go()
        if error is not None:
            error.add_note(f"under fuzz({self.seed}), which reproduces it")

    # --- turns

    def _point(self, ready: Callable[[], bool]) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._turn is None:
                return
            mine = self._threads.get(me) or self._came(me)
            if self._turn == me:
                if mine.ready is _arriving:  # chosen before it came
                    mine.ready = _always
                    return
                mine.ready = ready
                if self._next() == me:
                    return
            else:
                mine.ready = ready
        steps = len(self.order)
        while not mine.go.acquire(timeout=PATIENCE):
            with self._lock:
                if steps == len(self.order):
                    self.let_go = self.let_go or self._turn is not None
                    self._let_all_go()
                    return
            steps = len(self.order)

    def _others_wait(self) -> bool:
        return not any(
            thread.ready() for thread in self._threads.values() if thread.ready != self._others_wait
        )

    def _came(self, ident: int) -> _Thread:
        thread = self._threads[ident] = _Thread(self._count)
        self._count += 1
        return thread

    def _next(self) -> int | None:
        """Choose who goes on, and wake it; the lock is held."""
        able = [ident for ident, thread in self._threads.items() if thread.ready()]
        if not able:
            self.let_go = True
            self._let_all_go()
            return threading.get_ident()
        before, self._turn = self._turn, self._random.choice(able)
        thread = self._threads[self._turn]
        self.order.append(thread.number)
        if thread.ready is not _arriving and self._turn != before:
            thread.go.release()
        return self._turn

    def _let_all_go(self) -> None:
        self._turn = None
        for ident, thread in self._threads.items():
            if ident != threading.get_ident():
                thread.go.release()
        self._threads.clear()

    # --- what is told

    def waiting(self, ready: Callable[[], bool]) -> None:
        self._point(ready)

    def woke(self, thread: threading.Thread) -> None:
        """Take in a thread that waits since before anybody watched."""
        with self._lock:
            ident = thread.ident
            if self._turn is not None and ident is not None and ident not in self._threads:
                self._came(ident).ready = _arriving
        self._point(_always)

    def ending(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._threads.pop(me, None) is not None and self._turn == me:
                self._next()

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any], what: str) -> None:
        self._point(_always)

    def arrived(self, run: Any, replica: int, meeting: int) -> None:
        self._point(_always)

    def released(self, run: Any, replica: int, meeting: int) -> None:
        self._point(_always)

    def started(self, run: Any, replica: int) -> None:
        self._point(_always)

    def submitted(self, stream: Any, position: int) -> None:
        self._point(_always)

    def begun(self, stream: Any, position: int) -> None:
        self._point(_always)

    def done(self, stream: Any, position: int) -> None:
        self._point(_always)

    def leased(self, array: Any) -> None:
        self._point(_always)


def _always() -> bool:
    return True


def _arriving() -> bool:
    return True
