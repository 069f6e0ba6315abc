"""Ranges: tensors of different sizes are summed by different algorithms.

pscpu:2K:xring     tensors of at most 2048 elements ──►  pscpu
                   larger ones                      ──►  xring
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist.comm.base import Communicator
from minidist.comm.row import Row, columns
from minidist.comm.spec import Spec
from minidist.traffic import Outline, Places, Traffic


class ByRange(Communicator):
    """All-reduce by the algorithm of each tensor's range. members: one for each of the ranges."""

    def __init__(self, spec: Spec, members: Sequence[Communicator]) -> None:
        self._spec = spec
        self._members = tuple(members)
        self.devices = members[0].devices
        orders = {member.order for member in members}
        self.order = orders.pop() if len(orders) == 1 else "mixed"

    @property
    def replicas(self) -> int:
        return self._members[0].replicas

    @property
    def first(self) -> int:
        return self._members[0].first

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _heard(
        self, sources: Sequence[Row], weights: Sequence[float] | None
    ) -> tuple[Sequence[Row], Sequence[float] | None]:
        return sources, weights  # each member hears by itself

    def allocate(self, kinds: Sequence[tuple[tuple[int, ...], Any]]) -> Row:
        return self._members[0].allocate(kinds)

    def _agree(self, what: str) -> None:
        self._members[0]._agree(what)

    def _broadcast_rows(self, rows: Sequence[Row], root: int) -> None:
        self._members[0]._broadcast_rows(rows, root)

    def _gather_rows(self, sources: Sequence[Row]) -> list[Row]:
        return self._members[0]._gather_rows(sources)

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        chosen = self._spec.members([array.size for array in sources[0]])
        for member, own in zip(self._members, chosen, strict=True):
            if own:
                given, heard = member._heard(columns(sources, own), weights)
                member._all_reduce(given, columns(destinations, own), heard, scale, threads)

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        traffic = Traffic()
        chosen = self._spec.members([tensor.size for tensor in tensors])
        for member, own in zip(self._members, chosen, strict=True):
            wanted = [[places[i] for i in own] for places in destinations]
            traffic.update(member.predicted_bytes([tensors[i] for i in own], wanted))
        return traffic
