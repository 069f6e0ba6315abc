"""Apply: who runs the optimizer, on which copies, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from minidist import observe
from minidist.indexed_slices import IndexedSlices
from minidist.optim.optimizer import pieces_of
from minidist.traffic import Traffic
from minidist.variable import Variable
from minidist.variable_mgr.contribution import Combined
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class Apply(ABC):
    """Updates copies with combined gradients, in the meeting of all replicas or after it.

    in_parts: whether replicas update parts of each other's copies after it. Then they meet once
    more, and what an optimizer keeps beside the copies of a variable is in one place for all.
    """

    in_parts: ClassVar[bool] = False

    def accepts(self, optimizer: Optimizer, combined: Combined) -> bool:
        """Whether the gradients are to be applied at all; asked in the meeting, before it is."""
        return not optimizer.must_be_finite or optimizer.accepts([combined.finite()])

    def without_example(self, group: Group, optimizer: Optimizer) -> None:
        """Do in the meeting what is done where there is no example, and so nothing to apply."""
        return

    def close(self) -> None:
        """Wait for what is under way; nothing will be applied any more."""
        return

    def predicted_bytes(self, rows: Sequence[Sequence[Variable]]) -> Traffic:
        """Return what an update moves of variables whose gradients are dense: nothing."""
        return Traffic()

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


class EachAppliesItsPart(Apply):
    """After the meeting every replica updates its part of the variables, in the copies of all.

        replica 0    w0 [ new │     ]   w1 [ new │     ]
        replica 1    w0 [     │ new ]   w1 [     │ new ]

    All are on devices of one memory. Each element is computed once, from all replicas' gradients
    and the one slot that there is, and so read and written less often than by everybody for itself.
    """

    in_parts: ClassVar[bool] = True

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        pass

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        if observe.counting:
            combined.tell_ages(replica, replica)
            _tell_written(optimizer, combined, replica)
        _update(optimizer, combined, replica, threads, parts=combined.group.places)

    def predicted_bytes(self, rows: Sequence[Sequence[Variable]]) -> Traffic:
        """Each part of the variables, from the replica that updates it to all other copies."""
        traffic = Traffic()
        for row in rows:
            devices = [copy.device for copy in row[0].copies]
            for part, device in zip(shares(row), devices, strict=True):
                for other in devices:
                    traffic.go(device, other, part)
        return traffic


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


def _update(
    optimizer: Optimizer, combined: Combined, place: int, threads: int, parts: int = 1
) -> None:
    """Update the copies of one place, or one of several parts of all copies."""
    group = combined.group
    sums = {"replicas": 1 + len(combined.others)} if combined.others else {}
    with group.told("update", type(optimizer).__name__, combined.step, place=place, **sums):
        optimizer.update(
            place,
            group.variables,
            combined.rows[place],
            scale=combined.scale,
            threads=threads,
            parts=parts,
            others=combined.others,
            counts=combined.counts,
        )


def shares(variables: Sequence[Variable]) -> list[int]:
    """Return how many bytes of variables with dense gradients each replica updates."""
    places = len(variables[0].copies) if variables else 0
    return [
        sum([(end - first) * variables[i].dtype.itemsize for i, first, end in pieces])
        for pieces in pieces_of(variables, places)
    ]


def _tell_written(optimizer: Optimizer, combined: Combined, replica: int) -> None:
    """Tell what a replica is going to write into the copies of others."""
    group, gradients = combined.group, combined.rows[replica]
    pairs = list(zip(group.variables, gradients, strict=True))
    dense = [variable for variable, gradient in pairs if not isinstance(gradient, IndexedSlices)]
    sparse = [pair for pair in pairs if isinstance(pair[1], IndexedSlices)]
    written = {"sums": sum(shares(dense)[replica : replica + 1]), "rows": 0}
    for variable, gradient in sparse[replica :: group.places]:
        only_rows = optimizer.changes_only_rows(variable.copies[replica])
        array = gradient.values.array if only_rows else variable.copies[replica].array
        written["rows"] += array.nbytes
    own = group.copies[replica][0].device
    for copies in group.copies:
        for what, nbytes in written.items():
            observe.moved(own.short, copies[0].device.short, nbytes, what)
