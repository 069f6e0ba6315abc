"""Optimizers: a rule, its slots, and the way from a replica's gradients to the variables.

`apply_gradients` and `minimize` are called in a replica. They hand the gradients to the variable
manager of the strategy, which decides with whom they meet; it calls `update` with what came out,
for the copies and on the thread that the policy says. The arithmetic is kernels/update.h.

Weight decay is added to the mean gradient in the update, on the current weights, for variables
with `decays`: it is the gradient of weight_decay·Σw²/2, and goes through the slots like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minidist import context, ops
from minidist.device import Array
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.tape import GradientTape
from minidist.tensor import Tensor
from minidist.variable import Copy, Variable


@dataclass(slots=True)
class _Plan:
    """The arrays of one list of copies on one device, looked up once."""

    members: list[int]  # which of the list's copies
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
    """An update rule with its hyperparameters; `lr` may be set between steps.

    `slots` names the arrays kept beside each copy and the value that they start from.
    """

    slots: ClassVar[dict[str, float]]

    def __init__(self, lr: float, *, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self._slots: dict[Copy, list[Array]] = {}
        self._plans: dict[tuple[Copy, ...], list[_Plan]] = {}
        self._applied: dict[int, int] = {}

    @property
    def iterations(self) -> int:
        """How many times gradients have been applied: the global step."""
        return max(self._applied.values(), default=0)

    def apply_gradients(
        self, pairs: Iterable[tuple[Tensor | None, Variable]], count: int | None = None
    ) -> None:
        """Apply (gradient, variable) pairs; call it in a replica, in all of them alike.

        `count` is the number of examples behind this replica's gradients, where replicas have
        different ones. A gradient of None says that the variable was not used. The gradients
        are only read.
        Raises ContextError in cross-replica context, UsageError (a ValueError) where there is
        nothing to apply, ShapeError where a gradient does not fit its variable.
        """
        replica = context.get_replica_context()
        if replica is None:
            raise ContextError(
                f"apply_gradients was called in {context.describe()}; call it inside strategy.run, "
                "where each replica brings its own gradients"
            )
        gradients: list[Array | None] = []
        variables: list[Variable] = []
        for gradient, variable in pairs:
            gradients.append(_fitting(gradient, variable))
            variables.append(variable)
        if count is not None and (count < 0 or count != int(count)):
            raise UsageError(f"count is a number of examples and cannot be {count!r}")
        if not variables:
            raise UsageError("apply_gradients got no variables")
        if replica.num_replicas == 1 and all(gradient is None for gradient in gradients):
            raise UsageError("no variable has a gradient; is the loss computed from them?")
        strategy = variables[0].strategy
        if strategy is not context.get_strategy():
            raise ContextError(
                f"variable {variables[0].name!r} belongs to {strategy!r}, but gradients are "
                f"applied in {context.describe()}; call apply_gradients inside that strategy's run"
            )
        strategy.variable_mgr.apply_gradients(replica, self, gradients, variables, count)

    def minimize(
        self, loss_fn: Callable[[], Tensor], variables: Sequence[Variable], count: int | None = None
    ) -> Tensor:
        """Compute a loss, its gradients, and apply them; return the loss."""
        with GradientTape() as tape:
            loss = loss_fn()
        gradients = tape.gradient(loss, variables)
        self.apply_gradients(zip(gradients, variables, strict=True), count)
        return loss

    def slot(self, copy: Copy, name: str) -> Array:
        """Return an array that this optimizer keeps beside a copy, such as "momentum"."""
        return self._slots_of(copy)[list(self.slots).index(name)]

    # --- called by the variable manager

    def update(
        self,
        place: int,
        copies: tuple[Copy, ...],
        gradients: Sequence[Array],
        *,
        scale: float,
        threads: int,
    ) -> None:
        """Update the copies of one place with gradients·scale, using up to `threads` threads."""
        step = self._applied[place] = self._applied.get(place, 0) + 1
        plans = self._plans.get(copies)
        if plans is None:
            plans = self._plans[copies] = self._plan(copies)
        for plan in plans:
            row = (
                gradients
                if len(plan.members) == len(copies)
                else [gradients[i] for i in plan.members]
            )
            self._update(
                copies[plan.members[0]].device.ops,
                plan.weights,
                row,
                plan.slots,
                step,
                scale=scale,
                weight_decay=plan.weight_decay(self.weight_decay),
                threads=threads,
            )
        for copy in copies:
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

    def _plan(self, copies: tuple[Copy, ...]) -> list[_Plan]:
        by_device: dict[tuple[Any, Any], list[int]] = {}
        for i, copy in enumerate(copies):
            by_device.setdefault((copy.device, copy.array.dtype), []).append(i)
        return [
            _Plan(
                members,
                [copies[i].array for i in members],
                [
                    list(kind)
                    for kind in zip(*[self._slots_of(copies[i]) for i in members], strict=True)
                ],
                [copies[i].decays for i in members],
            )
            for members in by_device.values()
        ]

    def _slots_of(self, copy: Copy) -> list[Array]:
        if copy not in self._slots:
            arrays = []
            for start in self.slots.values():
                array = copy.device.allocate(copy.array.shape, copy.array.dtype)
                array[...] = start
                arrays.append(array)
            self._slots[copy] = arrays
        return self._slots[copy]


def _fitting(gradient: Any, variable: Variable) -> Array | None:
    """Return the array of a gradient that fits its variable."""
    if variable.dtype.kind != "f":
        raise ShapeError(
            f"variable {variable.name!r} is {variable.dtype}; an optimizer updates floating-point "
            "variables only, so leave it out"
        )
    if gradient is None:
        return None
    gradient = ops.as_tensor(gradient)
    if gradient.shape != variable.shape or gradient.dtype != variable.dtype:
        raise ShapeError(
            f"the gradient {gradient.dtype}{list(gradient.shape)} does not fit variable "
            f"{variable.name!r}, {variable.dtype}{list(variable.shape)}"
        )
    return gradient.array


class SGD(Optimizer):
    """w −= lr·g."""

    slots: ClassVar[dict[str, float]] = {}

    def _update(
        self, ops: Any, weights: Any, gradients: Any, slots: Any, step: int, **how: Any
    ) -> None:
        ops.sgd(weights, gradients, lr=self.lr, **how)


class Momentum(Optimizer):
    """m = μ·m + g; w −= lr·m, or with Nesterov w −= lr·(g + μ·m)."""

    slots: ClassVar[dict[str, float]] = {"momentum": 0.0}

    def __init__(
        self, lr: float, momentum: float = 0.9, nesterov: bool = False, *, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr, weight_decay=weight_decay)
        self.momentum = momentum
        self.nesterov = nesterov

    def _update(
        self, ops: Any, weights: Any, gradients: Any, slots: Any, step: int, **how: Any
    ) -> None:
        ops.momentum(
            weights,
            gradients,
            slots[0],
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            **how,
        )


class RMSProp(Optimizer):
    """s = ρ·s + (1−ρ)·g² from s = 1; m = μ·m + lr·g/√(s + ε); w −= m (as in tf_cnn_benchmarks)."""

    slots: ClassVar[dict[str, float]] = {"square": 1.0, "momentum": 0.0}

    def __init__(
        self,
        lr: float,
        decay: float = 0.9,
        momentum: float = 0.9,
        epsilon: float = 1.0,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay=weight_decay)
        self.decay = decay
        self.momentum = momentum
        self.epsilon = epsilon

    def _update(
        self, ops: Any, weights: Any, gradients: Any, slots: Any, step: int, **how: Any
    ) -> None:
        ops.rmsprop(
            weights,
            gradients,
            slots[0],
            slots[1],
            lr=self.lr,
            decay=self.decay,
            momentum=self.momentum,
            epsilon=self.epsilon,
            **how,
        )


class Adam(Optimizer):
    """Adam, algorithm 1 of Kingma and Ba 2015: w −= lr·m̂/(√v̂ + ε) with bias-corrected m̂ and v̂."""

    slots: ClassVar[dict[str, float]] = {"first": 0.0, "second": 0.0}

    def __init__(
        self,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay=weight_decay)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon

    def _update(
        self, ops: Any, weights: Any, gradients: Any, slots: Any, step: int, **how: Any
    ) -> None:
        ops.adam(
            weights,
            gradients,
            slots[0],
            slots[1],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            step=step,
            **how,
        )
