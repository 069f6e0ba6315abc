"""Apply: who runs the optimizer, on which copies, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from minidist import observe
from minidist.variable_mgr.combine import Combined

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class Apply(Protocol):
    """Updates copies with combined gradients, in the meeting of all replicas or after it."""

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        """Do what is done once, while all replicas wait."""

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        """Do what each replica does on its own thread after the meeting."""


class EveryReplicaApplies:
    """After the meeting every replica updates its own copy, all at the same time."""

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        pass

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        if observe.counting:
            combined.tell_ages(replica, replica)
        _update(optimizer, combined, replica, threads)


class OnceApplies:
    """In the meeting each variable's one copy is updated, before any replica reads it again."""

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        if observe.counting:
            combined.tell_ages(0)
        _update(optimizer, combined, 0, threads)

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        pass


def _update(optimizer: Optimizer, combined: Combined, place: int, threads: int) -> None:
    """Update the copies of one place."""
    group = combined.group
    with group.told("update", type(optimizer).__name__, combined.step, place=place):
        optimizer.update(
            place, group.variables, combined.rows[place], scale=combined.scale, threads=threads
        )
