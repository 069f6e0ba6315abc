"""VariableMgr: five parts put together, and the way of a gradient through them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minidist import context
from minidist.creation import VariableSynchronization, as_array
from minidist.device import Device
from minidist.errors import UsageError
from minidist.sync_on_read import SyncOnReadVariable
from minidist.tape import Gradient
from minidist.threads import cores
from minidist.values import local_results
from minidist.variable import Copy, Reader, Variable, make
from minidist.variable_mgr.apply import Apply
from minidist.variable_mgr.combine import (
    Combined,
    Contribution,
    Group,
    MeetingOfAll,
    Nothing,
    check_same,
)
from minidist.variable_mgr.place import Place
from minidist.variable_mgr.read import ReadOwn
from minidist.variable_mgr.start import Initial, Start

if TYPE_CHECKING:
    from minidist.context import ReplicaContext
    from minidist.optim import Optimizer


log = logging.getLogger("minidist")

ON_READ = VariableSynchronization.ON_READ


@dataclass(eq=False)
class VariableMgr:
    """A policy: who owns a variable, in five answers.

    place      where its copies live
    read       what a replica computes with
    combine    how gradients meet
    apply      who runs the optimizer
    start      what the copies hold before the first step
    """

    name: str
    devices: tuple[Device, ...]
    place: Place
    read: Callable[[Sequence[Copy], Sequence[Device]], Reader]
    combine: Nothing | MeetingOfAll
    apply: Apply
    start: Start
    _groups: dict[tuple[Variable, ...], Group] = field(default_factory=dict, init=False, repr=False)
    _told: dict[Group, object] = field(default_factory=dict, init=False, repr=False)  # of unused

    # --- variables

    def create(
        self,
        strategy: Any,
        initial: Sequence[Initial],
        *,
        name: str,
        dtype: Any,
        beside: Variable | None = None,
        **options: Any,
    ) -> Variable:
        """Return a new variable with its copies in place. Runs once, in cross-replica context.

        `initial` has a function for each replica that gives its initial value. A variable of one
        copy is put where the (first) copy of `beside` is.
        """
        values = [as_array(value, dtype) for value in self.start.values(initial)]
        if options["synchronization"] is ON_READ:
            SyncOnReadVariable.check(name, values[0].dtype, options["aggregation"])
            devices: Sequence[Device] = self.devices
        else:
            device = beside.copies[0].device if beside is not None else None
            devices = self.place.devices(values[0].nbytes, device)
        copies = [
            Copy(
                _copy_name(name, i),
                device.copy_in(values[i]),
                device,
                options["decays"],
            )
            for i, device in enumerate(devices)
        ]
        return self._put_together(strategy, copies, name=name, **options)

    def twin(self, variable: Variable, **changes: Any) -> Variable:
        """Return a variable like another one, with copies of its copies; `changes` are options."""
        options = {
            "name": variable.name,
            "trainable": variable.trainable,
            "synchronization": variable.synchronization,
            "aggregation": variable.aggregation,
            "decays": variable.decays,
            **changes,
        }
        copies = []
        for i, copy in enumerate(variable.copies):
            array = copy.device.allocate(copy.array.shape, copy.array.dtype)
            copy.device.copy(array, copy.array)
            name = _copy_name(options["name"], i)
            copies.append(Copy(name, array, copy.device, options["decays"]))
        return self._put_together(variable.strategy, copies, **options)

    def slot(self, variable: Variable, name: str, value: float) -> Variable:
        """Return a new variable full of `value` with a copy beside each of another's."""
        slot = self.twin(variable, name=name, trainable=False, decays=False)
        for copy in slot.copies:
            copy.array[...] = value
        return slot

    def _put_together(self, strategy: Any, copies: Sequence[Copy], **options: Any) -> Variable:
        """Return a variable of these copies, of the kind that the policy makes of them."""
        kind = Variable if context.is_default(strategy) else self.place.kind
        read = self.read
        if options["synchronization"] is ON_READ:
            kind, read = SyncOnReadVariable, ReadOwn
        return make(kind, copies, read(copies, self.devices), strategy, **options)

    @property
    def independent(self) -> bool:
        """Whether each replica trains a model of its own, all of which belong in a checkpoint."""
        return not isinstance(self.combine, MeetingOfAll)

    # --- gradients

    def apply_gradients(
        self,
        replica: ReplicaContext,
        optimizer: Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[Variable],
        count: int | None,
    ) -> None:
        """Bring one replica's gradients: combine them with the others', update the variables.

        Called by every replica on its own thread. When it returns, the replica computes with the
        new values.
        """
        contribution = Contribution(self._group(variables), list(gradients), count, optimizer)
        combined: Combined | None
        if isinstance(self.combine, MeetingOfAll):
            combined = replica.merge_call(_meet, self, contribution)
        else:
            combined = self._alone(contribution)
        if combined is not None:
            self.apply.in_replica(
                optimizer, combined, replica.replica_id, max(1, cores() // len(self.devices))
            )

    def distributed_apply(
        self,
        optimizer: Optimizer,
        rows: Sequence[Sequence[Gradient | None]],
        variables: Sequence[Variable],
        counts: Sequence[int | None],
    ) -> None:
        """Do for all replicas, one after the other, what each does in `apply_gradients`.

        `rows` and `counts` have what each replica brings. Runs in cross-replica context.
        """
        group = self._group(variables)
        contributions = [
            Contribution(group, list(row), count, optimizer)
            for row, count in zip(rows, counts, strict=True)
        ]
        if isinstance(self.combine, MeetingOfAll):
            results = [self.meet(contributions)] * len(rows)
        else:
            results = [self._alone(contribution) for contribution in contributions]
        for replica, combined in enumerate(results):
            if combined is not None:
                self.apply.in_replica(optimizer, combined, replica, cores())

    def _alone(self, contribution: Contribution) -> Combined | None:
        assert isinstance(self.combine, Nothing)
        (used,) = self._without_unused([contribution])
        return self.combine.combine(used)

    def meet(self, contributions: Sequence[Contribution]) -> Combined | None:
        """Combine, in the meeting, what all replicas brought, and apply what is applied there."""
        assert isinstance(self.combine, MeetingOfAll)
        check_same(contributions)
        contributions = self._without_unused(contributions)
        threads = cores() if len(self.devices) > 1 else 1
        combined = self.combine.combine(contributions, threads)
        if combined is not None:
            self.apply.in_meeting(contributions[0].optimizer, combined, threads)
        return combined

    def _without_unused(self, contributions: Sequence[Contribution]) -> Sequence[Contribution]:
        """Leave out the variables that no replica has used."""
        columns = zip(*[contribution.gradients for contribution in contributions], strict=True)
        used = [i for i, column in enumerate(columns) if any(part is not None for part in column)]
        if len(used) == len(contributions[0].gradients):
            return contributions
        if not used:
            raise UsageError(
                "no replica has a gradient for any of the variables; is the loss "
                "computed from them?"
            )
        whole = contributions[0].group
        part = whole.part(used)
        first = object()  # of several replicas, each alone, the first tells
        if self._told.setdefault(part, first) is first:
            unused = [name for i, name in enumerate(whole.names) if i not in used]
            log.warning("no gradient for %s; what is not used is left alone", ", ".join(unused))
        return [
            replace(contribution, group=part, gradients=[contribution.gradients[i] for i in used])
            for contribution in contributions
        ]

    def _group(self, variables: Sequence[Variable]) -> Group:
        key = tuple(variables)
        group = self._groups.get(key)
        if group is not None:
            return group
        for variable in key:
            if variable.everywhere and not self.place.kind.everywhere:
                raise UsageError(
                    f"variable {variable.name!r} is ON_READ, each replica's own, but under "
                    f"{self.name} gradients are applied once, where a variable's only copy is; "
                    "assign it, or create it without ON_READ"
                )
        return self._groups.setdefault(key, Group(key))


def _meet(strategy: Any, manager: VariableMgr, contributions: Any) -> Combined | None:
    return manager.meet(local_results(contributions))


def _copy_name(name: str, i: int) -> str:
    return name if i == 0 else f"{name}/replica_{i}"
