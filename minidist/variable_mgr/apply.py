"""Apply: who runs the optimizer, on which copies, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from minidist import observe
from minidist.variable_mgr.contribution import Combined
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class Apply(ABC):
    """Updates copies with combined gradients, in the meeting of all replicas or after it."""

    def accepts(self, optimizer: Optimizer, combined: Combined) -> bool:
        """Whether the gradients are to be applied at all; asked in the meeting, before it is."""
        return not optimizer.must_be_finite or optimizer.accepts([combined.finite()])

    def without_example(self, group: Group, optimizer: Optimizer) -> None:
        """Do in the meeting what is done where there is no example, and so nothing to apply."""
        return

    def close(self) -> None:
        """Wait for what is under way; nothing will be applied any more."""
        return

    @abstractmethod
    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        """Do what is done once, while all replicas wait."""

    @abstractmethod
    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        """Do what each replica does on its own thread after the meeting."""


class EveryReplicaApplies(Apply):
    """After the meeting every replica updates its own copy, all at the same time."""

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        pass

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        if observe.counting:
            combined.tell_ages(replica, replica)
        _update(optimizer, combined, replica, threads)


class OnceApplies(Apply):
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
    sums = {"replicas": 1 + len(combined.others)} if combined.others else {}
    with group.told("update", type(optimizer).__name__, combined.step, place=place, **sums):
        optimizer.update(
            place,
            group.variables,
            combined.rows[place],
            scale=combined.scale,
            threads=threads,
            others=combined.others,
            counts=combined.counts,
        )
