"""Start: what the copies of a variable hold before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minidist import context


class Start(Protocol):
    """Answers what each copy of a new variable holds."""

    def values(self, initial_value: Callable[[], Any], copies: int) -> list[Any]:
        """Return one value for each copy, calling `initial_value` in the context of its replica."""


class FromFirst:
    """Replica 0's value, copied to all."""

    def values(self, initial_value: Callable[[], Any], copies: int) -> list[Any]:
        return [_as_replica(0, initial_value)] * copies


class OwnValues:
    """Every replica starts from random numbers of its own."""

    def values(self, initial_value: Callable[[], Any], copies: int) -> list[Any]:
        draws = dict(context.frame().draws)
        values = [_as_replica(0, initial_value)]
        for replica in range(1, copies):
            with context.entered(draws=dict(draws)):       # the same draw, of another replica
                values.append(_as_replica(replica, initial_value))
        return values


def _as_replica(replica: int, initial_value: Callable[[], Any]) -> Any:
    with context.entered(replica_id=replica):
        return initial_value()
