"""Group: variables whose gradients are combined together, and the buckets for their sums.

A bucket is one buffer on one device that holds a gradient for each variable, each 64-byte aligned;
it is made once and used in every step.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from minidist import observe
from minidist.comm import Communicator, Row, allocate_row
from minidist.errors import UsageError
from minidist.optim.optimizer import check_dtype
from minidist.variable import Variable

if TYPE_CHECKING:
    from minidist.optim import Optimizer

log = logging.getLogger("minidist")
NOTHING = object()


class Group:
    """Variables in the order in which gradients are given for them, to one optimizer.

    Raises UsageError for a variable that comes twice, ShapeError for one that is not floating
    point.
    """

    def __init__(self, variables: Sequence[Variable], optimizer: Optimizer) -> None:
        self.variables = tuple(variables)
        self.optimizer = weakref.ref(optimizer)
        for variable, times in Counter(variables).items():
            if times > 1:
                raise UsageError(
                    f"variable {variable.name!r} comes with {times} gradients; add them up first"
                )
            check_dtype(variable)
        self.names = [variable.name for variable in self.variables]
        self.places = len(variables[0].copies)
        self.copies = [
            tuple(variable.copies[place] for variable in variables) for place in range(self.places)
        ]
        # What must be the same in all ranks, in words.
        self.details = [
            f"variable {v.name!r}, {v.dtype}{list(v.shape)}, decays={v.decays}"
            for v in self.variables
        ]
        self.nbytes = sum(copy.array.nbytes for copy in self.copies[0])
        self.index = {id(variable): i for i, variable in enumerate(self.variables)}
        self._rows: dict[int, list[Row]] = {}
        self._parts: dict[tuple[int, ...], Group] = {}
        # What parts of a policy keep with it, so that it lives no longer than the variables do.
        self.plan: Any = None  # of overlap: its buckets
        self.filling: Any = None  # of overlap: the buckets that replicas fill now
        self.turn = 0  # of relaxed: which rows the next sums go to
        self.waiting: Any = NOTHING  # of relaxed: the sums of the step before; None: no example
        self.outgoing: Any = None  # of ps: its messages
        self._told: dict[Group, object] = {}

    def told(self, kind: str, name: str, step: int, **about: Any) -> AbstractContextManager[None]:
        """Return a with statement's way to tell what is done to the gradients of a step."""
        if not observe.watching:
            return observe.nothing
        variables, nbytes = self.names, self.nbytes
        return observe.span(kind, name, step=step, variables=variables, bytes=nbytes, **about)

    def part(self, members: Sequence[int]) -> Group:
        """Return the group of only some of the variables; the same one whenever asked again."""
        key = tuple(members)
        part = self._parts.get(key)
        return part or self._parts.setdefault(key, self._part(key))

    def _part(self, members: Sequence[int]) -> Group:
        optimizer = self.optimizer()
        assert optimizer is not None  # it is being used
        return Group([self.variables[i] for i in members], optimizer)

    def rows(self, turn: int = 0, communicator: Communicator | None = None) -> list[Row]:
        """Return for each place an array for each variable, on that copy's device.

        Each turn has buckets of its own, so that one turn's sums can be applied while the next
        one's are taken. communicator: who makes those of the only place, if they are not yet there.
        """
        rows = self._rows.get(turn)
        if rows is None:
            rows = self._rows[turn] = [
                self._row(place, communicator) for place in range(self.places)
            ]
        return rows

    def made(self, turn: int) -> Sequence[Row]:
        """Return the rows of a turn if they are there already, else nothing."""
        return self._rows.get(turn, ())

    def _row(self, place: int, communicator: Communicator | None) -> Row:
        kinds = [(copy.array.shape, copy.array.dtype) for copy in self.copies[place]]
        if communicator is not None:
            return communicator.allocate(kinds)
        devices = [copy.device for copy in self.copies[place]]
        return allocate_row(list(zip(devices, kinds, strict=True)))

    def tell_unused(self, used: Sequence[int]) -> None:
        """Say once which have no gradient; of replicas that each go alone, the first says it."""
        first = object()
        if self._told.setdefault(self.part(used), first) is first:
            unused = [name for i, name in enumerate(self.names) if i not in used]
            log.warning("no gradient for %s; what is not used is left alone", ", ".join(unused))
