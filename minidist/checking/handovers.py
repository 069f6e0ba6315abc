"""Handovers: how Python's own threads, queues and events order what their users do.

While somebody checks they tell so. Locks, conditions, semaphores and queue.SimpleQueue do not: what
a program orders by these, or by a file, it can tell itself: observe.gave(key) where it hands over,
observe.took(key) where it takes.
"""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem
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


def _takes_if_true(method: Method) -> Method:
    """What gives False has not seen anything: a wait that timed out, a flag that is down."""

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        happened = method(self, *args, **kwargs)
        if happened:
            observe.took(self)
        return happened

    return told


def _meets(method: Method) -> Method:
    return _gives(_takes(method))


_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _starts(method: Method) -> Method:
    def told(self: threading.Thread) -> None:
        run = self.run

        def told_run() -> None:
            self.__dict__.pop("run", None)  # checks may be nested, and each has put one there
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


def _made(method: Method) -> Method:
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        method(self, *args, **kwargs)
        observe.gave(self)

    return told


def _begins(method: Method) -> Method:
    def told(self: Any) -> Any:
        observe.took(self)
        return method(self)

    return told


HAND_OVERS = Telling(
    [
        (threading.Thread, "start", _starts),
        (threading.Thread, "join", _joins),
        (threading.Event, "set", _gives),
        (threading.Event, "wait", _takes_if_true),
        (threading.Event, "is_set", _takes_if_true),
        (threading.Barrier, "wait", _meets),
        (queue.Queue, "put", _gives),
        (queue.Queue, "get", _takes),
        (queue.Queue, "task_done", _gives),
        (queue.Queue, "join", _takes),
        (_WorkItem, "__init__", _made),
        (_WorkItem, "run", _begins),
        (Future, "done", _takes_if_true),
        (Future, "set_result", _gives),
        (Future, "set_exception", _gives),
        (Future, "result", _takes),
        (Future, "exception", _takes),
    ]
)
