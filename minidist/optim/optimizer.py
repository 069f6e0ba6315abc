"""Optimizer: a rule, its slots, and the way from a replica's gradients to the variables.

`apply_gradients` and `minimize` are called in a replica. They hand the gradients to the variable
manager of the strategy, which decides with whom they meet; it calls `update` with what came out,
for the copies and on the thread that the policy says.

What is applied is the gradient of the mean loss over the global batch: the mean over the replicas,
weighted by `count` where they have different numbers of examples, for any number of replicas. A
loss that is a sum over examples makes each replica's gradient larger but is averaged like any
other; multiply it by the number of replicas where the sum over the global batch is meant.

Weight decay is added to the mean gradient in the update, on the current weights, for variables
with `decays`: it is the gradient of weight_decay·Σw²/2, and goes through the slots like any other.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from minidist import context, ops
from minidist.device import Array
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.tape import Gradient, GradientTape
from minidist.tensor import Tensor
from minidist.values import local_results
from minidist.variable import Copy, Variable

Rate = float | Callable[[int], float]


def number(name: str, value: Any, *, below: float = math.inf) -> float:
    """Return a hyperparameter that is a number from 0 to just below a limit, or a UsageError."""
    if not isinstance(value, int | float | np.number) or not 0 <= value < below:
        limit = "a finite number" if below == math.inf else f"below {below:g}"
        raise UsageError(f"{name} must be at least 0 and {limit}, not {value!r}")
    return float(value)


@dataclass(slots=True)
class _Plan:
    """The arrays of one place's variables on one device, looked up once."""

    members: list[int]  # which of the variables
    ops: Any
    weights: list[Array]
    slots: list[list[Array]]  # one list for each kind of slot
    decays: list[bool]
    decay_rates: list[float] = field(default_factory=list)
    decay_of: float = -1.0

    def weight_decay(self, rate: float) -> list[float]:
        if rate != self.decay_of:
            self.decay_rates = [rate if decays else 0.0 for decays in self.decays]
            self.decay_of = rate
        return self.decay_rates


class Optimizer(ABC):
    """An update rule with its hyperparameters, which may be set between steps.

    `lr` is a number, or a function that gives it for the number of steps taken so far. `slots`
    names what is kept beside each copy of a variable, and the value that it starts from.
    """

    slots: ClassVar[dict[str, float]]
    zero_changes_nothing: ClassVar[bool] = False  # whether a zero gradient leaves a weight alone

    def __init__(self, lr: Rate, *, weight_decay: float = 0.0) -> None:
        self.lr = lr if callable(lr) else number("lr", lr)
        self.weight_decay = number("weight_decay", weight_decay)
        self._slots: dict[Variable, list[Variable]] = {}
        self._creating = threading.Lock()
        self._plans: dict[tuple[int, tuple[Variable, ...]], list[_Plan]] = {}
        self._zeros: dict[Copy, Array] = {}  # between two updates all of these are zero
        self._applied: dict[int, int] = {}  # by place

    @property
    def iterations(self) -> int:
        """How many times gradients have been applied: the global step."""
        return max(self._applied.values(), default=0)

    def apply_gradients(
        self,
        pairs: Iterable[tuple[Tensor | IndexedSlices | None, Variable]],
        count: int | None = None,
    ) -> None:
        """Apply (gradient, variable) pairs; call it in a replica, in all of them alike.

        `count` is the number of examples behind this replica's gradients, where replicas have
        different ones. A gradient of None says that the variable was not used; it is left alone,
        with a warning, where no replica uses it. The gradients are only read.
        Raises ContextError in cross-replica context, UsageError (a ValueError) where there is
        nothing to apply, ShapeError where a gradient does not fit its variable.
        """
        replica = context.get_replica_context()
        if replica is None:
            raise ContextError(
                f"apply_gradients was called in {context.describe()}; call it inside strategy.run, "
                "where each replica brings its own gradients, or use distributed_apply"
            )
        gradients: list[Gradient | None] = []
        variables: list[Variable] = []
        for gradient, variable in pairs:
            gradients.append(_fitting(gradient, variable))
            variables.append(variable)
        _check_count(count)
        if not variables:
            raise UsageError("apply_gradients got no variables")
        strategy = variables[0].strategy
        if strategy is not context.get_strategy():
            raise ContextError(
                f"variable {variables[0].name!r} belongs to {strategy!r}, but gradients are "
                f"applied in {context.describe()}; call apply_gradients inside that strategy's run"
            )
        strategy.variable_mgr.apply_gradients(replica, self, gradients, variables, count)

    def distributed_apply(
        self, pairs: Iterable[tuple[Any, Variable]], counts: Sequence[int] | None = None
    ) -> None:
        """Apply what all replicas found, in cross-replica context: in a merge function, or outside.

        Each pair has a PerReplica gradient, as `strategy.run` returns it (one that is the same in
        all replicas may be plain); `counts` has a number of examples for each replica.
        Raises ContextError in a replica, and what `apply_gradients` raises.
        """
        pairs = list(pairs)
        variables = [variable for _, variable in pairs]
        if not variables:
            raise UsageError("distributed_apply got no variables")
        strategy = variables[0].strategy
        strategy._require("distributed_apply", replica="call apply_gradients there")
        n = strategy.num_replicas
        rows = [
            [_fitting(_component(gradient, replica, n), variable) for gradient, variable in pairs]
            for replica in range(n)
        ]
        each: Sequence[int | None] = [None] * n if counts is None else counts
        if len(each) != n:
            raise UsageError(f"there are {len(each)} counts for {n} replicas; give one for each")
        for count in each:
            _check_count(count)
        strategy.variable_mgr.distributed_apply(self, rows, variables, each)

    def minimize(
        self, loss_fn: Callable[[], Tensor], variables: Sequence[Variable], count: int | None = None
    ) -> Tensor:
        """Compute a loss, its gradients, and apply them; return the loss."""
        if not callable(loss_fn):
            raise ContextError(
                f"minimize got a loss that is a {type(loss_fn).__name__}, computed where no tape "
                "saw it; pass the function that computes it"
            )
        with GradientTape() as tape:
            loss = loss_fn()
        gradients = tape.gradient(loss, variables)
        self.apply_gradients(zip(gradients, variables, strict=True), count)
        return loss

    # --- state

    def slot(self, variable: Variable, name: str) -> Variable:
        """Return what this optimizer keeps beside a variable, such as "momentum".

        It is a variable itself, "kernel/Momentum", with a copy beside each of `variable`'s. Where
        a rule keeps several, the slot's name follows: "kernel/Adam/first".
        Raises UsageError (a ValueError) where the rule has no slot of that name.
        """
        if name not in self.slots:
            raise UsageError(
                f"{type(self).__name__} keeps no {name!r} beside a variable; its slots are "
                f"{', '.join(self.slots) or 'none'}"
            )
        return self._slots_of(variable)[list(self.slots).index(name)]

    def has_slots(self, variable: Variable) -> bool:
        """Whether this optimizer keeps something beside a variable already."""
        return variable in self._slots

    def iterations_at(self, place: int) -> int:
        """Return how many times gradients have been applied to the copies of one place."""
        return self._applied.get(place, 0)

    def restore_iterations(self, counts: Sequence[int]) -> None:
        """Go on counting from these, one count for each place."""
        self._applied = dict(enumerate(counts))

    def _slots_of(self, variable: Variable) -> list[Variable]:
        """Return a variable's slots, made once, by whichever replica asks first."""
        if variable not in self._slots:
            with self._creating:
                if variable not in self._slots:
                    manager = variable.strategy.variable_mgr
                    self._slots[variable] = [
                        manager.slot(variable, self.slot_name(variable, slot), start)
                        for slot, start in self.slots.items()
                    ]
        return self._slots[variable]

    def slot_name(self, variable: Variable, slot: str) -> str:
        """Return what a slot is called, which may not be there yet."""
        name = f"{variable.name}/{type(self).__name__}"
        return name if len(self.slots) == 1 else f"{name}/{slot}"

    # --- called by the variable manager

    def update(
        self,
        place: int,
        variables: tuple[Variable, ...],
        gradients: Sequence[Gradient],
        *,
        scale: float,
        threads: int,
    ) -> None:
        """Update the copies of one place with gradients·scale, using up to `threads` threads.

        An IndexedSlices among the gradients has each of its indices once.
        """
        step = self._applied.get(place, 0) + 1
        lr = self.lr(step - 1) if callable(self.lr) else self.lr
        how = {"lr": lr, "scale": scale, "threads": threads}
        dense = [i for i, g in enumerate(gradients) if not isinstance(g, IndexedSlices)]
        if len(dense) < len(gradients):
            for variable, gradient in zip(variables, gradients, strict=True):
                if isinstance(gradient, IndexedSlices):
                    self._update_rows(place, variable, gradient, step, how)
            variables = tuple([variables[i] for i in dense])
            gradients = [gradients[i] for i in dense]
        for plan in self._plan(place, variables):
            whole = len(plan.members) == len(variables)
            self._update(
                plan.ops,
                plan.weights,
                gradients if whole else [gradients[i] for i in plan.members],
                plan.slots,
                step,
                weight_decay=plan.weight_decay(self.weight_decay),
                **how,
            )
        for variable in variables:
            variable.copies[place].version += 1
        self._applied[place] = step

    def _update_rows(
        self, place: int, variable: Variable, gradient: IndexedSlices, step: int, how: Any
    ) -> None:
        """Update one copy as with the dense gradient, but visit only what that changes."""
        copy = variable.copies[place]
        ops, rows, values = copy.device.ops, gradient.indices.array, gradient.values.array
        decay = self.weight_decay if copy.decays else 0.0
        slots = [[slot.copies[place].array] for slot in self._slots_of(variable)]
        if self.zero_changes_nothing and not decay:
            weights = ops.gather(copy.array, rows)
            self._update(ops, [weights], [values], slots, step, weight_decay=[0.0], **how)
            ops.scatter(copy.array, rows, weights)
        else:
            zeros = self._zeros.get(copy)
            if zeros is None:
                zeros = self._zeros[copy] = copy.device.allocate(variable.shape, variable.dtype)
                zeros[...] = 0
            ops.scatter(zeros, rows, values)
            self._update(ops, [copy.array], [zeros], slots, step, weight_decay=[decay], **how)
            ops.scatter(zeros, rows, ops.full((), 0, variable.dtype))
        copy.version += 1

    @abstractmethod
    def _update(
        self,
        ops: Any,
        weights: Sequence[Array],
        gradients: Sequence[Array],
        slots: Sequence[Sequence[Array]],
        step: int,
        **how: Any,
    ) -> None:
        """Call the kernel of the rule; `step` counts from 1."""

    def _plan(self, place: int, variables: tuple[Variable, ...]) -> list[_Plan]:
        plans = self._plans.get((place, variables))
        if plans is not None:
            return plans
        by_device: dict[tuple[Any, Any], list[int]] = {}
        for i, variable in enumerate(variables):
            by_device.setdefault((variable.copies[place].device, variable.dtype), []).append(i)
        plans = self._plans[place, variables] = []
        for (device, _), members in by_device.items():
            chosen = [variables[i] for i in members]
            slots = zip(*[self._slots_of(variable) for variable in chosen], strict=True)
            plans.append(
                _Plan(
                    members,
                    device.ops,
                    [variable.copies[place].array for variable in chosen],
                    [[slot.copies[place].array for slot in kind] for kind in slots],
                    [variable.copies[place].decays for variable in chosen],
                )
            )
        return plans


def _fitting(gradient: Any, variable: Variable) -> Gradient | None:
    """Return the array of a gradient, or the rows of it, that fits its variable."""
    if variable.dtype.kind != "f":
        raise ShapeError(
            f"variable {variable.name!r} is {variable.dtype}; an optimizer updates floating-point "
            "variables only, so leave it out"
        )
    if gradient is None:
        return None
    sparse = isinstance(gradient, IndexedSlices)
    if not sparse:
        gradient = ops.as_tensor(gradient)
    if gradient.shape != variable.shape or gradient.dtype != variable.dtype:
        raise ShapeError(
            f"the gradient {gradient.dtype}{list(gradient.shape)} does not fit variable "
            f"{variable.name!r}, {variable.dtype}{list(variable.shape)}"
        )
    return gradient.coalesced() if sparse else gradient.array


def _check_count(count: int | None) -> None:
    if count is not None and (count < 0 or count != int(count)):
        raise UsageError(f"count is a number of examples and cannot be {count!r}")


def _component(gradient: Any, replica: int, n: int) -> Any:
    parts = local_results(gradient)
    if len(parts) not in (1, n):
        raise UsageError(f"a gradient has {len(parts)} components for {n} replicas")
    return parts[replica if len(parts) == n else 0]
