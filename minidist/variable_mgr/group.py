"""Group: variables whose gradients are combined together, and the buckets for their sums.

A bucket is one buffer on one device that holds a gradient for each variable, each 64-byte aligned;
it is made once and used in every step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from minidist.comm import allocate_row
from minidist.device import Array
from minidist.errors import UsageError
from minidist.optim.optimizer import check_dtype
from minidist.variable import Variable

log = logging.getLogger("minidist")


class Group:
    """Variables in the order in which gradients are given for them.

    Raises UsageError for a variable that comes twice, ShapeError for one that is not floating
    point.
    """

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.variables = tuple(variables)
        for variable, times in Counter(variables).items():
            if times > 1:
                raise UsageError(
                    f"variable {variable.name!r} comes with {times} gradients; add them up first"
                )
            check_dtype(variable)
        self.places = len(variables[0].copies)
        self.copies = [
            tuple(variable.copies[place] for variable in variables) for place in range(self.places)
        ]
        self.index = {id(variable): i for i, variable in enumerate(self.variables)}
        self._rows: dict[int, list[list[Array]]] = {}
        self._parts: dict[tuple[int, ...], Group] = {}
        self._told: dict[Group, object] = {}

    @property
    def names(self) -> list[str]:
        return [variable.name for variable in self.variables]

    def part(self, members: Sequence[int]) -> Group:
        """Return the group of only some of the variables; the same one whenever asked again."""
        key = tuple(members)
        part = self._parts.get(key)
        return part or self._parts.setdefault(key, Group([self.variables[i] for i in key]))

    def rows(self, turn: int = 0) -> list[list[Array]]:
        """Return for each place an array for each variable, on that copy's device.

        Each turn has buckets of its own, so that one turn's sums can be applied while the next
        one's are taken.
        """
        rows = self._rows.get(turn)
        if rows is None:
            rows = self._rows[turn] = [self._row(place) for place in range(self.places)]
        return rows

    def _row(self, place: int) -> list[Array]:
        return allocate_row(
            [(copy.device, (copy.array.shape, copy.array.dtype)) for copy in self.copies[place]]
        )

    def tell_unused(self, used: Sequence[int]) -> None:
        """Say once which have no gradient; of replicas that each go alone, the first says it."""
        first = object()
        if self._told.setdefault(self.part(used), first) is first:
            unused = [name for i, name in enumerate(self.names) if i not in used]
            log.warning("no gradient for %s; what is not used is left alone", ", ".join(unused))
