"""Late: of variables on ps, replicas compute with the step before, while the next values arrive.

    step t         push g(t) ─────► ps ─────► W(t) arrives, in the copies of this worker
    step t + 1     computes with W(t - 1)       └─► is put into the replicas' StagingAreas

It is staged.py with the wait for the ps taken out of the meeting: the copy streams wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minidist import observe
from minidist.device import Array, Device, Event, host
from minidist.tensor import Reading
from minidist.variable_mgr.contribution import Combined
from minidist.variable_mgr.errand import Errand
from minidist.variable_mgr.served import ServedCopy, ServersApply, SumForServers, put_part
from minidist.variable_mgr.servers import Servers
from minidist.variable_mgr.staged import ReadStaged, StagedReader

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class LateCopy(ServedCopy):
    """One whose new value may still be on its way from the ps: whoever looks at it waits."""

    __slots__ = ("_array", "_tensor", "arrival")

    def __init__(self, name: str, array: Array, device: Device, decays: bool) -> None:
        self.arrival: Errand | None = None
        super().__init__(name, array, device, decays)

    @property
    def array(self) -> Array:
        self._await()
        return self._array

    @array.setter
    def array(self, array: Array) -> None:
        self._array = array

    @property
    def tensor(self) -> Reading:
        self._await()
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: Reading) -> None:
        self._tensor = tensor

    @property
    def late(self) -> Reading:
        """What is read here once the new value has arrived."""
        return self._tensor

    def _await(self) -> None:
        arrival = self.arrival
        if arrival is not None:
            arrival.wait()
            self.arrival = None


class ApplyLate(ServersApply):
    """The copies take the answer while the next step runs; who looks at them earlier waits."""

    def __init__(self, sums: SumForServers, servers: Servers) -> None:
        super().__init__(sums, servers)
        self._last: Errand | None = None  # takes the answer to what was pushed last

    @property
    def arrival(self) -> Event | None:
        """After which there is the answer to what was pushed last."""
        return None if self._last is None else self._last.event

    def close(self) -> None:
        if self._last is not None:
            self._last.end()  # the run that has failed has said it

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        if self._last is not None:
            self._last.wait()
        if self._sent is not None:  # it is there already
            super().in_meeting(optimizer, combined, threads)
            return
        group = combined.group
        if observe.counting:
            combined.tell_ages(0)
        sent = self._push(optimizer, combined)
        self._count(optimizer, group, None)
        copies = {i: group.variables[i].copies[0] for i in self._sums.used}
        arrays = {i: copy.array for i, copy in copies.items()}

        def take() -> None:
            sent.wait()
            sent.each(lambda i, part: put_part(copies[i], arrays[i], part))

        self._last = Errand(host().stream("communication"))
        self._last.add(take)
        for copy in copies.values():
            assert isinstance(copy, LateCopy)
            copy.version += 1
            copy.arrival = self._last


class ReadLate(ReadStaged):
    """As ReadStaged; what is put into the areas comes from the ps while the next step runs."""

    def __init__(self, devices: Sequence[Device], apply: ApplyLate) -> None:
        super().__init__(devices)
        self._apply = apply

    def put_all(self, readers: Sequence[StagedReader]) -> None:
        arrival = self._apply.arrival
        values = []
        for reader in readers:
            assert isinstance(reader.copy, LateCopy)
            values.append(reader.copy.late)
        if arrival is not None:
            for device in self._devices:
                device.stream("copy").wait(arrival)
        self._put(values)
