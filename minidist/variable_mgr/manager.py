"""VariableMgr: five parts put together, and the way of a gradient through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist import variable as variables_module
from minidist.device import Array, Device
from minidist.errors import UsageError
from minidist.tensor import Tensor
from minidist.threads import cores
from minidist.values import local_results
from minidist.variable import Copy, Reader, Variable
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
from minidist.variable_mgr.start import Initial, Start

if TYPE_CHECKING:
    from minidist.context import ReplicaContext
    from minidist.optim import Optimizer


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

    # --- variables

    def create(
        self, strategy: Any, initial: Sequence[Initial], *, name: str, dtype: Any, **options: Any
    ) -> Variable:
        """Return a new variable with its copies in place. Runs once, in cross-replica context.

        `initial` has a function for each replica that gives its initial value.
        """
        values = [as_array(value, dtype) for value in self.start.values(initial)]
        copies = [
            Copy(
                name if i == 0 else f"{name}/replica_{i}",
                device.copy_in(values[i]),
                device,
                options["decays"],
            )
            for i, device in enumerate(self.place.devices(values[0].nbytes))
        ]
        return variables_module.make(
            copies, self.read(copies, self.devices), strategy, name=name, **options
        )

    # --- gradients

    def apply_gradients(
        self,
        replica: ReplicaContext,
        optimizer: Optimizer,
        gradients: Sequence[Array | None],
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
            (contribution,) = self._without_unused([contribution])
            combined = self.combine.combine(contribution)
        if combined is not None:
            self.apply.in_replica(
                optimizer, combined, replica.replica_id, max(1, cores() // len(self.devices))
            )

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
        return [
            replace(
                contribution,
                group=self._group([contribution.group.variables[i] for i in used]),
                gradients=[contribution.gradients[i] for i in used],
            )
            for contribution in contributions
        ]

    def _group(self, variables: Sequence[Variable]) -> Group:
        key = tuple(variables)
        return self._groups.get(key) or self._groups.setdefault(key, Group(key))


def _meet(strategy: Any, manager: VariableMgr, contributions: Any) -> Combined | None:
    return manager.meet(local_results(contributions))


def as_array(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return an initial value as a host array: float32 unless it, or the caller, says otherwise."""
    if isinstance(value, Variable):
        value = value.read()
    if isinstance(value, Tensor):
        value = value.numpy()
    if dtype is None and not hasattr(value, "dtype"):
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype == np.float64 else array
    return np.asarray(value, dtype)
