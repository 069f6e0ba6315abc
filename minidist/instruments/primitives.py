"""Primitives: the verbs of a CPU device, told where they are used, or kept to be timed alone.

A primitive is a verb of `device.ops` as the program uses it; what it computes inside, with other
verbs, belongs to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from minidist import context, observe, threads
from minidist.checking.telling import Method, Telling
from minidist.device.cpu_ops import CpuOps
from minidist.device.ops import WRITES, Ops
from minidist.strategy import Strategy

VERBS = sorted(Ops.__abstractmethods__)
TIMES = 5  # that a primitive is done for its median


class _Here(threading.local):
    inside = False  # whether this thread is in a primitive
    kept: list[Call] | None = None  # where it keeps its primitives


_here = _Here()


class Call(NamedTuple):
    """A primitive with all that it was given."""

    name: str
    verb: Method
    ops: Ops
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apart(self) -> Call:
        """Return the same work, which writes to copies: whose the arrays are notices nothing."""
        written = WRITES.get(self.name, {})
        args = [_copied(self.ops, a) if i in written else a for i, a in enumerate(self.args)]
        kwargs = {k: _copied(self.ops, a) if k in written else a for k, a in self.kwargs.items()}
        return self._replace(args=tuple(args), kwargs=kwargs)

    def seconds(self) -> float:
        """Return how long it takes, over and over again with nothing in between."""
        again, times = self.apart(), []
        for _ in range(TIMES):
            started = time.perf_counter()
            again.verb(again.ops, *again.args, **again.kwargs)
            times.append(time.perf_counter() - started)
        return median(times)


def _copied(ops: Ops, value: Any) -> Any:
    """Return a copy of an array, or of all arrays in lists; what is left out stays None."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return ops.copy(value)
    return [_copied(ops, each) for each in value]


def _telling(name: str) -> Any:
    def wrap(verb: Method) -> Method:
        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _here.inside:
                return verb(self, *args, **kwargs)
            if _here.kept is not None:
                _here.kept.append(Call(name, verb, self, args, kwargs))
            _here.inside = True
            try:
                with observe.span("verb", name):
                    return verb(self, *args, **kwargs)
            finally:
                _here.inside = False

        return told

    return wrap


_TELLING = Telling([(CpuOps, name, _telling(name)) for name in VERBS])


@contextmanager
def told() -> Iterator[None]:
    """Let the primitives of CPU devices tell when they begin and end, as spans of kind "verb"."""
    _TELLING.begin()
    try:
        yield
    finally:
        _TELLING.end()


class Kept(observe.Observer):
    """Keeps what every replica's thread does while a with statement lasts, within `told`.

    All arrays of that time stay in memory until the primitives were timed.
    """

    def __init__(self) -> None:
        self._calls: dict[int, list[Call]] = {}  # by the replica's number in this process

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> Any:
        if kind != "replica":
            return None
        _here.kept = self._calls.setdefault(about["replica"], [])
        return True

    def end(self, token: Any) -> None:
        if token:
            _here.kept = None

    def __bool__(self) -> bool:
        return any(self._calls.values())

    def alone(self, strategy: Strategy) -> dict[int, float]:
        """Return for each replica the seconds of its primitives, each done alone.

        All replicas do theirs at the same time, so that the cores are as busy as in a step. Where
        there are more replicas than cores they take turns: nobody else's work is in their time.
        """
        crowded = len(strategy.devices) > threads.cores()
        turn: AbstractContextManager[None] = observe.Lock() if crowded else observe.nothing

        def replica() -> float:
            here = context.get_replica_context()
            assert here is not None
            with turn:
                return sum(call.seconds() for call in self._calls.pop(here.local_id, ()))

        with strategy.uncounted():
            return dict(enumerate(strategy.local_results(strategy.run(replica))))
