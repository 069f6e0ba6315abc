"""Telling: methods that tell what they do, in place of the plain ones while anybody checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

Method = Callable[..., Any]


class Telling:
    """Methods of classes and what wraps each of them, between the first `begin` and the last `end`.

    Objects that were made before tell too.
    """

    def __init__(self, methods: list[tuple[type, str, Callable[[Method], Method]]]) -> None:
        self._methods = methods
        self._plain: list[tuple[type, str, Method | None]] = []
        self._users = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for kind, name, telling in self._methods:
                self._plain.append((kind, name, vars(kind).get(name)))
                method = getattr(kind, name)
                setattr(kind, name, wraps(method)(telling(method)))

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for kind, name, method in reversed(self._plain):
                if method is None:  # it was inherited
                    delattr(kind, name)
                else:
                    setattr(kind, name, method)
            self._plain.clear()
