"""The state of a training as arrays with names: what there is, and how it is put back.

    w                  the value of variable w, in all replicas or for all of them
    w/replica_1        replica 1's own value, where that is not one for all: under `independent`,
                       or synchronized ON_READ without an aggregation; w is replica 0's then
    w/Momentum …       what an optimizer keeps beside it is a variable too
    w/staged …         what the policy holds from step to step; see variable_mgr/held.py

Other names say nothing of policy and number of replicas, so any strategy can go on from any
other's state. Replicas are those of all workers; of their own values, each worker has only some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist import tensor_file
from minidist.creation import VariableAggregation, VariableSynchronization
from minidist.dtypes import HostArray, kind
from minidist.errors import UsageError
from minidist.optim import Optimizer
from minidist.tensor import Tensor
from minidist.variable import Copy, Variable
from minidist.variable_mgr.held import Held, Kept


def taken_out(
    named: Mapping[str, Sequence[Part]], keys: Collection[str] | None = None
) -> dict[str, HostArray]:
    """Return copies of those arrays of a state that this process has; with `keys`, only of these.

    All workers do this together: some values are made of all of theirs.
    """
    arrays = {}
    for key, (part, *_) in named.items():
        wanted = part.copy_here is not None and (keys is None or key in keys)
        if wanted or part.of_all:
            value = part.take_out()
            if wanted:
                arrays[key] = value
    return arrays


def held_of(variables: Iterable[Variable]) -> dict[str, Kept]:
    """Return what the policy holds now beside variables, by its name in a state."""
    found = {}
    for key, (variable, held) in held_by_key(variables).items():
        kept = held.take_out(variable)
        if kept is not None:
            found[key] = kept
    return found


def variables_of(what: Any) -> tuple[Variable, ...]:
    """Return all variables of a model, or of a sequence of models and variables, each once.

    A model is whatever has `variables`. Raises UsageError (a ValueError) where there are none.
    """
    found = tuple(dict.fromkeys(_walk(what)))
    if not found:
        raise UsageError("there are no variables to save or load; has the model been built?")
    return found


def _walk(what: Any) -> Iterator[Variable]:
    if isinstance(what, Variable):
        yield what
    elif hasattr(what, "variables"):
        yield from what.variables
    elif isinstance(what, Iterable) and not isinstance(what, str | bytes | np.ndarray | Tensor):
        for item in what:
            yield from _walk(item)
    else:
        raise UsageError(f"variables and models can be saved and loaded, and not {what!r}")


def slots_of(
    variables: Iterable[Variable], optimizer: Optimizer | None, saved: Collection[str] = ()
) -> tuple[Variable, ...]:
    """Return what an optimizer keeps beside variables, as variables; what lacks is made.

    That is beside trainable variables, also before the optimizer has run, and beside others that
    it has been applied to, here or (names that are `saved` say so) in the state's past. Beside what
    a parameter server holds there is nothing here.
    """
    return tuple(
        optimizer.slot(variable, slot)
        for variable, slot in slot_names(variables, optimizer, saved).values()
        if optimizer is not None and server_of(variable) is None
    )


def slot_names(
    variables: Iterable[Variable], optimizer: Optimizer | None, saved: Collection[str] = ()
) -> dict[str, tuple[Variable, str]]:
    """Return what `slots_of` speaks of by its name in a state: beside which variable, which slot.

    Of what a parameter server holds too.
    """
    if optimizer is None:
        return {}
    return {
        optimizer.slot_name(variable, slot): (variable, slot)
        for variable in variables
        if kind(variable.dtype) == "f"
        for slot in optimizer.slots
        if variable.trainable
        or optimizer.has_slots(variable)
        or optimizer.slot_name(variable, slot) in saved
    }


def server_of(variable: Variable) -> int | None:
    """Return which parameter server holds a variable, None where the workers do."""
    servers = variable.strategy.variable_mgr.servers
    return None if servers is None else servers.task_of(variable)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of the state: a variable's value for all replicas, or one replica's."""

    variable: Variable
    replica: int | None  # among those of all workers; None: for all

    @property
    def copy_here(self) -> Copy | None:
        """The copy that has the value; None where only another worker has one."""
        if self.replica is None:
            return self.variable.copies[0]
        here = self.replica - self.variable.strategy.variable_mgr.site.first
        return self.variable.copies[here] if 0 <= here < len(self.variable.copies) else None

    @property
    def of_all(self) -> bool:
        """Whether all workers' copies make the value, so that all must take it out together."""
        on_read = self.variable.synchronization is VariableSynchronization.ON_READ
        return on_read and self.replica is None

    def key(self, copies: int) -> str:
        """Return its name in a state with so many copies of what each replica has of its own.

        Replicas that have none there share replica 0's.
        """
        in_state = self.replica is not None and 0 < self.replica < copies
        return f"{self.variable.name}/replica_{self.replica}" if in_state else self.variable.name

    def take_out(self) -> HostArray:
        """Return a copy of the array in the host's memory."""
        if self.replica is None:
            return self.variable.to_save()
        copy = self.copy_here
        assert copy is not None
        return copy.device.copy_out(copy.array)

    def put_back(self, array: HostArray) -> None:
        """Set the value, as far as it is here, from an array of the variable's shape and dtype."""
        copy = self.copy_here
        if self.replica is None:
            self.variable.restore(array)
        elif copy is not None:
            copy.write(Tensor(copy.device.copy_in(array), copy.device))


def _parts(variable: Variable) -> list[Part]:
    if variable.synchronization is VariableSynchronization.ON_READ:
        apart = variable.aggregation is VariableAggregation.NONE
    else:
        apart = variable.strategy.variable_mgr.independent
    replicas = range(variable.strategy.variable_mgr.site.replicas) if apart else [None]
    return [Part(variable, replica) for replica in replicas]


def copies_of(variables: Iterable[Variable]) -> int:
    """Return of how many replicas a state of these variables holds copies."""
    return max(len(_parts(variable)) for variable in variables)


def held_by_key(variables: Iterable[Variable]) -> dict[str, tuple[Variable, Held]]:
    """Return by its name in a state what the policy may hold beside each variable."""
    return {
        f"{variable.name}/{held.suffix}": (variable, held)
        for variable in variables
        for held in variable.strategy.variable_mgr.held
    }


def by_key(variables: Collection[Variable], copies: int) -> dict[str, list[Part]]:
    """Return all parts by their names in a state that has so many copies.

    Raises UsageError (a ValueError) where a name would mean two things, and for what a file cannot
    hold.
    """
    found: dict[str, list[Part]] = {}
    held = held_by_key(variables)
    for variable in variables:
        if variable.name == tensor_file.METADATA:
            raise UsageError(f"{variable!r} cannot be saved: the format reserves its name")
        if variable.dtype.name not in tensor_file.DTYPES:
            raise UsageError(
                f"{variable!r} cannot be saved: files hold {', '.join(tensor_file.DTYPES)}"
            )
        for part in _parts(variable):
            alike = found.setdefault(part.key(copies), [])
            other = alike[0].variable if alike else variable
            if part.key(copies) in held:
                other = held[part.key(copies)][0]
            if other is not variable:
                raise UsageError(
                    f"the name {part.key(copies)!r} would mean both {other!r} and "
                    f"{variable!r}; give each its own, for instance by md.name_scope where it is "
                    "created"
                )
            alike.append(part)
    return found
