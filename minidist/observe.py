"""Observe: what happens while replicas work, told to whoever watches. By default nobody does.

The places where something happens say so:

    if observe.watching:
        observe.moved("host", "cpu:1", array.nbytes, name)
    with observe.span("reduce", "all_reduce"):
        ...

and each instrument (bytes, staleness, timeline, race checker) is an `Observer` that listens to what
it needs. While nobody watches, a place costs the look at `watching`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_lock = threading.Lock()
_nothing = nullcontext()


class Observer:
    """Hears everything, on the thread where it happens, and does nothing with it.

    A method must be quick, must not raise, and may be called from many threads at once.
    """

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> Any:
        """Hear that the calling thread begins something; what is returned comes back to `end`."""

    def end(self, token: Any) -> None:
        """Hear that it has ended, be it by an exception. Ends come in the opposite order."""

    def moved(self, source: str, destination: str, nbytes: int, what: str) -> None:
        """Hear that bytes went from one device's memory to another's, by their short names."""


watching: tuple[Observer, ...] = ()


@contextmanager
def attached(observer: Observer) -> Iterator[None]:
    """Let an observer watch for the length of a with statement, in all threads."""
    global watching
    with _lock:
        watching = (*watching, observer)
    try:
        yield
    finally:
        with _lock:
            watching = tuple(each for each in watching if each is not observer)


def span(kind: str, name: str, **about: Any) -> AbstractContextManager[None]:
    """Return a with statement's way to tell of something that takes time."""
    return _span(kind, name, about) if watching else _nothing


@contextmanager
def _span(kind: str, name: str, about: dict[str, Any]) -> Iterator[None]:
    tokens = [(observer, observer.begin(kind, name, about)) for observer in watching]
    try:
        yield
    finally:
        for observer, token in reversed(tokens):
            observer.end(token)


def moved(source: str, destination: str, nbytes: int, what: str) -> None:
    """Tell of bytes that went from one device to another; within one device none do."""
    if source != destination and nbytes:
        for observer in watching:
            observer.moved(source, destination, nbytes, what)
