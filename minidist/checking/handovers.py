"""Handovers: how Python's own threads, queues and events order what their users do.

While somebody checks they tell so. What a program orders by other means (a lock of its own, a file)
it can tell itself: observe.gave(key) where it hands over, observe.took(key) where it takes.
"""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from minidist import observe
from minidist.checking.telling import Method, Telling


def _gives(method: Method) -> Method:
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        observe.gave(self)
        return method(self, *args, **kwargs)

    return told


def _takes(method: Method) -> Method:
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            observe.took(self)

    return told


_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _starts(method: Method) -> Method:
    def told(self: threading.Thread) -> None:
        run = self.run

        def told_run() -> None:
            del self.run
            observe.took(self)
            try:
                run()
            finally:
                observe.gave(self)
                _running.discard(self)
                observe.ending()

        self.run = told_run  # type: ignore[method-assign]
        _running.add(self)
        observe.gave(self)
        method(self)
        observe.woke(self)

    return told


def _joins(method: Method) -> Method:
    def told(self: threading.Thread, timeout: float | None = None) -> None:
        observe.waiting(lambda: self not in _running)
        method(self, timeout)
        if self not in _running:
            observe.took(self)

    return told


HAND_OVERS = Telling(
    [
        (threading.Thread, "start", _starts),
        (threading.Thread, "join", _joins),
        (threading.Event, "set", _gives),
        (threading.Event, "wait", _takes),
        (threading.Event, "is_set", _takes),
        (queue.Queue, "put", _gives),
        (queue.Queue, "get", _takes),
        (Future, "set_result", _gives),
        (Future, "set_exception", _gives),
        (Future, "result", _takes),
        (Future, "exception", _takes),
    ]
)
