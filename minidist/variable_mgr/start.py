"""Start: what the copies of a variable hold before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minidist import context
from minidist.comm.peers import Peers
from minidist.comm.sharing import agree, of_first
from minidist.dtypes import HostArray

Initial = Callable[[], Any]


class Start(Protocol):
    """Answers what each copy of a new variable holds."""

    def values(self, initial: Sequence[Initial]) -> list[Any]:
        """Return a value for each replica, from functions that give each one's initial value."""

    def met(self, values: Sequence[HostArray], details: Sequence[str]) -> Sequence[HostArray]:
        """Return what the values are once other workers have been met for them.

        details: what the variable is, in words.
        """


class FromFirst:
    """The first replica's value, copied to all."""

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = peers or Peers()

    def values(self, initial: Sequence[Initial]) -> list[Any]:
        return [_as_replica(0, initial[0])] * len(initial)

    def met(self, values: Sequence[HostArray], details: Sequence[str]) -> Sequence[HostArray]:
        peers, first = self._peers, values[0]
        if peers.count == 1:
            return values
        details = [*details, f"of {first.dtype}{list(first.shape)}"]
        agree(peers, "create a variable", details)
        return [of_first(peers, "start from the first worker's value", first)] * len(values)


class OwnValues:
    """Every replica starts from its own value, random ones from random numbers of its own."""

    def __init__(self, first: int = 0) -> None:
        """first: the number of the first replica of this process."""
        self._first = first

    def values(self, initial: Sequence[Initial]) -> list[Any]:
        draws = dict(context.frame().draws)
        values = [_as_replica(self._first, initial[0])]
        for replica in range(1, len(initial)):
            with context.entered(draws=dict(draws)):  # the same draw, of another replica
                values.append(_as_replica(self._first + replica, initial[replica]))
        return values

    def met(self, values: Sequence[HostArray], details: Sequence[str]) -> Sequence[HostArray]:
        return values


def _as_replica(replica: int, initial: Initial) -> Any:
    with context.entered(replica_id=replica):
        return initial()
