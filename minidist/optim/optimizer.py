"""Optimizer: a rule, its slots, and the way from a replica's gradients to the variables.

`apply_gradients` and `minimize` are called in a replica. They hand the gradients to the variable
manager of the strategy, which decides with whom they meet; it calls `update` with what came out,
for the copies and on the thread that the policy says.

What is applied is the gradient of the mean loss over the global batch: the mean over the replicas,
weighted by `count` where they have different numbers of examples, for any number of replicas. A
loss that is a sum over examples makes each replica's gradient larger but is averaged like any
other; multiply it by the number of replicas where the sum over the global batch is meant.

On its way into the weights the mean gradient is divided by the loss scale, clipped by value or by
global norm, and then weight decay is added, on the current weights, for variables with `decays`:
it is the gradient of weight_decay·Σw²/2, and goes through the slots like any other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypedDict, cast

import numpy as np

from minidist import context, observe, ops
from minidist.device import Array, Device
from minidist.device.ops import Ops, Tensors, Update
from minidist.dtypes import is_narrow
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.optim.accumulation import Accumulator
from minidist.optim.loss_scale import LossScale
from minidist.optim.parts import Piece, cut
from minidist.tape import Gradient, GradientTape
from minidist.tensor import Tensor
from minidist.values import local_results
from minidist.variable import Copy, Variable

Rate = float | Callable[[int], float]

# Numbers, or None, that an optimizer has and no update is computed with; `lr` may be a function.
NOT_OF_A_RULE = ("lr", "loss_scale", "gradient_accumulation_steps")


def number(name: str, value: Any, *, below: float = math.inf) -> float:
    """Return a hyperparameter that is a number from 0 to just below a limit, or a UsageError."""
    if not isinstance(value, int | float | np.number) or not 0 <= value < below:
        limit = "a finite number" if below == math.inf else f"below {below:g}"
        raise UsageError(f"{name} must be at least 0 and {limit}, not {value!r}")
    return float(value)


class Options(TypedDict, total=False):
    """What every optimizer takes beside its own hyperparameters; see Optimizer."""

    weight_decay: float
    gradient_clip: float | None
    gradient_clip_norm: float | None
    loss_scale: LossScale | float | None
    gradient_accumulation_steps: int


@dataclass(slots=True)
class _Plan:
    """The arrays that one place updates together, on one device, looked up once."""

    pieces: list[Piece]  # of which of the variables
    ops: Ops
    weights: list[Array]
    slots: list[list[Array]]  # one list for each kind of slot
    copies: list[list[Array]]  # the same of the weights for each place that is updated too
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

    lr: a number, or a function that gives it for the number of steps taken so far.
    weight_decay: see above.
    gradient_clip: each element is clipped to ± this.
    gradient_clip_norm: the gradients g of all variables of a call are multiplied by
        min(1, gradient_clip_norm/‖g‖), ‖g‖² = Σ over all their elements (Pascanu et al. 2013).
        One of the two, not both.
    loss_scale: the gradients are those of the loss times this; see `scaled`. A number or a
        LossScale.
    gradient_accumulation_steps: so many calls make one step; see minidist.optim.accumulation.

    `slots` names what is kept beside each copy of a variable, and the value that it starts from.
    """

    slots: ClassVar[dict[str, float]]
    zero_changes_nothing: ClassVar[bool] = False  # whether a zero gradient leaves a weight alone

    def __init__(
        self,
        lr: Rate,
        *,
        weight_decay: float = 0.0,
        gradient_clip: float | None = None,
        gradient_clip_norm: float | None = None,
        loss_scale: LossScale | float | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        self.lr = lr if callable(lr) else number("lr", lr)
        self.weight_decay = number("weight_decay", weight_decay)
        self.gradient_clip = _limit("gradient_clip", gradient_clip)
        self.gradient_clip_norm = _limit("gradient_clip_norm", gradient_clip_norm)
        if gradient_clip is not None and gradient_clip_norm is not None:
            raise UsageError("gradient_clip and gradient_clip_norm contradict each other: give one")
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            loss_scale = LossScale(loss_scale)
        self.loss_scale = loss_scale
        if type(gradient_accumulation_steps) is not int or gradient_accumulation_steps < 1:
            raise UsageError(
                "gradient_accumulation_steps is a number of calls from 1, not "
                f"{gradient_accumulation_steps!r}"
            )
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.groups: dict[tuple[int, ...], Any] = {}  # by ids: variables that it was used for
        self._accumulators: dict[tuple[int, tuple[Variable, ...]], Accumulator] = {}
        self._slots: dict[Variable, list[Variable]] = {}
        self._creating = observe.Lock(hands_over=True)
        self._plans: dict[tuple[int, tuple[Variable, ...]], list[_Plan]] = {}
        self._zeros: dict[Copy, Array] = {}  # between two updates all of these are zero
        self._applied: dict[int, int] = {}  # by place
        # Where others hold more variables of the same step: adds their squared norms to our own.
        self.squares_of_all: Callable[[list[float]], list[float]] = list

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
        replica = self._replica("apply_gradients")
        given = [(_fitting(gradient, variable), variable) for gradient, variable in pairs]
        variables = [variable for _, variable in given]
        manager = self._manager("apply_gradients", variables)
        _check_count(count)
        contribution = manager.contribution(self, variables, count)
        contribution.gradients[:] = [gradient for gradient, _ in given]
        self._bring(replica, contribution)

    def _replica(self, verb: str) -> context.ReplicaContext:
        replica = context.get_replica_context()
        if replica is None:
            raise ContextError(
                f"{verb} was called in {context.describe()}; call it inside strategy.run, "
                "where each replica brings its own gradients, or use distributed_apply"
            )
        return replica

    def _manager(self, verb: str, variables: Sequence[Variable]) -> Any:
        """Return whose the variables are, which must be the current strategy's."""
        if not variables:
            raise UsageError(f"{verb} got no variables")
        strategy = variables[0].strategy
        if strategy is not context.get_strategy():
            raise ContextError(
                f"variable {variables[0].name!r} belongs to {strategy!r}, but gradients are "
                f"applied in {context.describe()}; call {verb} inside that strategy's run"
            )
        return strategy.variable_mgr

    def _bring(self, replica: context.ReplicaContext, contribution: Any) -> None:
        """Hand a replica's gradients to the variable manager, once all batches are there."""
        whole = self._accumulated(replica.local_id, contribution)
        if whole is not None:
            whole.group.variables[0].strategy.variable_mgr.apply_gradients(replica, whole)

    def _accumulated(self, replica: int, contribution: Any) -> Any:
        if self.gradient_accumulation_steps == 1:
            return contribution
        variables = contribution.group.variables
        accumulator = self._accumulators.get((replica, variables))
        if accumulator is None:
            device = variables[0].strategy.devices[replica]
            accumulator = Accumulator(device, self.gradient_accumulation_steps)
            self._accumulators[replica, variables] = accumulator
        failed = variables[0].strategy.failed_runs
        done = accumulator.add(contribution.gradients, contribution.count, failed)
        if done is None:
            return None
        gradients, count = done
        own = {"order": [], "reusable": count != 0}  # without an example they are the last batch's
        return replace(contribution, gradients=gradients, count=count, **own)

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
        n = len(strategy.devices)
        rows = [
            [_fitting(_component(gradient, replica, n), variable) for gradient, variable in pairs]
            for replica in range(n)
        ]
        each: Sequence[int | None] = [None] * n if counts is None else counts
        if len(each) != n:
            raise UsageError(f"there are {len(each)} counts for {n} replicas; give one for each")
        for count in each:
            _check_count(count)
        contributions = []
        for replica, (row, count) in enumerate(zip(rows, each, strict=True)):
            contribution = strategy.variable_mgr.contribution(self, variables, count)
            contribution.gradients[:] = row
            contributions.append(self._accumulated(replica, contribution))
        if contributions[0] is not None:
            strategy.variable_mgr.distributed_apply(contributions)

    def minimize(
        self, loss_fn: Callable[[], Tensor], variables: Sequence[Variable], count: int | None = None
    ) -> Tensor:
        """Compute a loss, its gradients, and apply them; return the loss, without its scale.

        It does what `apply_gradients` does with a tape's gradients, to the same bits, but
        gradients may be summed with the other replicas' while the backward pass goes on.
        """
        if not callable(loss_fn):
            raise ContextError(
                f"minimize got a loss that is a {type(loss_fn).__name__}, computed where no tape "
                "saw it; pass the function that computes it"
            )
        with GradientTape() as tape:
            loss = loss_fn()
            target = self.scaled(loss)
        replica = self._replica("minimize")
        manager = self._manager("minimize", variables)
        _check_count(count)
        whole = self.gradient_accumulation_steps == 1
        contribution = manager.contribution(self, variables, count, replica if whole else None)
        into = None if contribution.bucket is None else contribution.in_bucket
        tape.gradient(target, variables, contribution.give, into)
        self._bring(replica, contribution)
        return loss

    @property
    def settings(self) -> list[str]:
        """The rule and its numbers of the next step, each in words: the same in all ranks."""
        numbers = {
            **self.numbers,
            "loss_scale": self.current_loss_scale,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        known = [f"{name}={value!r}" for name, value in numbers.items() if name[0] != "_"]
        return [type(self).__name__, *known]

    @property
    def numbers(self) -> dict[str, float | None]:
        """The rule's numbers for the next step, by name; bool and int are numbers too."""
        numbers: dict[str, float | None] = {"lr": self._rate(self.iterations)}
        for name, value in vars(self).items():
            known = value is None or isinstance(value, int | float | np.number)
            if known and name not in NOT_OF_A_RULE:
                numbers[name] = value
        return numbers

    def _rate(self, steps: int) -> float:
        """Return the learning rate after so many steps."""
        return number("lr", self.lr(steps)) if callable(self.lr) else self.lr

    def changes_only_rows(self, copy: Any) -> bool:
        """Whether a gradient of some rows changes no others, in a variable or a copy of one."""
        return self.zero_changes_nothing and not (self.weight_decay and copy.decays)

    # --- loss scale

    @property
    def current_loss_scale(self) -> float:
        """What losses are to be multiplied by, and gradients are divided by; 1 without a scale."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, of which the gradients are to be taken."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    @property
    def must_be_finite(self) -> bool:
        """Whether gradients are looked at before they are applied."""
        return self.loss_scale is not None and self.loss_scale.automatic

    @property
    def needs_sums(self) -> bool:
        """Whether sums of gradients are looked at as a whole before any of them is applied."""
        return self.must_be_finite or self.gradient_clip_norm is not None

    def accepts(self, finite: Sequence[bool | None]) -> bool:
        """Note, once a step, whether the gradients of all are finite; return whether they apply.

        None is for who has no gradients to apply.
        """
        assert self.loss_scale is not None
        known = [each for each in finite if each is not None]
        return bool(known) and self.loss_scale.update(all(known))

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

    def require_whole_step(self, verb: str) -> None:
        """Raise UsageError where gradients wait for more before they are applied."""
        for accumulator in self._accumulators.values():
            if accumulator.begun:
                raise UsageError(
                    f"a training cannot be {verb} while {accumulator.begun} of "
                    f"{self.gradient_accumulation_steps} gradients that make a step are there; do "
                    "it after the last one"
                )

    def _slots_of(self, variable: Variable) -> list[Variable]:
        """Return a variable's slots, made once, by whichever replica asks first."""
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
        parts: int = 1,
        others: Sequence[Sequence[Gradient | None]] = (),
        counts: Sequence[float] | None = None,
    ) -> None:
        """Update the copies of one place with gradients·scale, using up to `threads` threads.

        An IndexedSlices among the gradients has each of its indices once.
        parts: of several, the one with the number of the place is updated, and put into the copies
        of all places; see minidist.optim.parts.
        others: gradients of more replicas, to be added to these in the same pass, unless the
        optimizer `needs_sums`; None beside an IndexedSlices. counts: how many times each replica's
        are taken.
        """
        step = self._applied.get(place, 0) + 1
        if self.gradient_clip_norm is not None:
            norm = self._norm(place, variables, gradients, threads) * scale
            scale *= min(1.0, self.gradient_clip_norm / norm) if norm else 1.0
        how: Update = {
            "lr": self._rate(step - 1),
            "scale": scale,
            "weight_decay": (),  # said anew for whatever is updated together
            "threads": threads,
        }
        if self.gradient_clip is not None:
            how["clip"] = self.gradient_clip
        changed = variables
        dense = [i for i, g in enumerate(gradients) if not isinstance(g, IndexedSlices)]
        if len(dense) < len(gradients):
            sparse = [i for i in range(len(gradients)) if i not in set(dense)]
            for turn, i in enumerate(sparse):
                if turn % parts == place % parts:
                    gradient = cast(IndexedSlices, gradients[i])
                    self._update_rows(place, variables[i], gradient, step, how, parts > 1)
            variables = tuple([variables[i] for i in dense])
            gradients = [gradients[i] for i in dense]
            others = [[row[i] for i in dense] for row in others]
        for plan in self._plan(place, variables, parts):
            rows = [
                [_piece(row[piece.array], piece) for piece in plan.pieces]
                for row in (gradients, *others)
            ]
            if counts is not None or others:
                how["others"], how["counts"] = rows[1:], counts
            if plan.copies:
                how["copies"] = plan.copies
            how["weight_decay"] = plan.weight_decay(self.weight_decay)
            self._update(plan.ops, plan.weights, rows[0], plan.slots, step, how)
        for variable in changed:
            variable.copies[place].version += 1
        self._applied[place] = step

    def _norm(
        self, place: int, variables: Sequence[Variable], gradients: Sequence[Gradient], threads: int
    ) -> float:
        """Return the global norm of gradients of the copies of a place; see global_norm."""
        devices = [variable.copies[place].device for variable in variables]
        return global_norm(devices, gradients, threads, self.squares_of_all)

    def _update_rows(
        self,
        place: int,
        variable: Variable,
        gradient: IndexedSlices,
        step: int,
        how: Update,
        everywhere: bool,
    ) -> None:
        """Update one copy as with the dense gradient, but visit only what that changes.

        everywhere: whether the other copies get the new values too.
        """
        copy = variable.copies[place]
        more = [other.array for other in variable.copies if everywhere and other is not copy]
        ops, rows, values = copy.device.ops, gradient.indices.array, gradient.values.array
        decay = self.weight_decay if copy.decays else 0.0
        slots = [[slot.copies[place].array] for slot in self._slots_of(variable)]
        if self.changes_only_rows(copy):
            weights = ops.gather(copy.array, rows)
            how = {**how, "weight_decay": [0.0]}
            self._update(ops, [weights], [values], slots, step, how)
            for array in (copy.array, *more):
                ops.scatter(array, rows, weights)
        else:
            zeros = self._zeros.get(copy)
            if zeros is None:
                zeros = self._zeros[copy] = copy.device.allocate(variable.shape, variable.dtype)
                ops.fill(zeros, 0)
            ops.scatter(zeros, rows, values)
            how = {**how, "weight_decay": [decay]}
            if more:
                how["copies"] = [[array] for array in more]
            self._update(ops, [copy.array], [zeros], slots, step, how)
            ops.scatter(zeros, rows, ops.full((), 0, variable.dtype))

    @abstractmethod
    def _update(
        self,
        ops: Ops,
        weights: Tensors,
        gradients: Tensors,
        slots: Sequence[Tensors],
        step: int,
        how: Update,
    ) -> None:
        """Call the kernel of the rule; `step` counts from 1."""

    def _plan(self, place: int, variables: tuple[Variable, ...], parts: int) -> list[_Plan]:
        plans = self._plans.get((place, variables))
        if plans is not None:
            return plans
        pieces = pieces_of(variables, parts)[place % parts]
        by_device: dict[tuple[Any, Any], list[Piece]] = {}
        for piece in pieces:
            variable = variables[piece.array]
            by_device.setdefault((variable.copies[place].device, variable.dtype), []).append(piece)
        plans = self._plans[place, variables] = []
        others = [other for other in range(parts) if parts > 1 and other != place]
        for (device, _), some in by_device.items():
            chosen = [variables[piece.array] for piece in some]
            slots = zip(*[self._slots_of(variable) for variable in chosen], strict=True)

            def at(place: int, arrays: Iterable[Variable], some: list[Piece] = some) -> list[Array]:
                pairs = zip(arrays, some, strict=True)
                return [_piece(variable.copies[place].array, piece) for variable, piece in pairs]

            plans.append(
                _Plan(
                    some,
                    device.ops,
                    at(place, chosen),
                    [at(place, kind) for kind in slots],
                    [at(other, chosen) for other in others],
                    [variable.copies[place].decays for variable in chosen],
                )
            )
        return plans


def pieces_of(variables: Sequence[Variable], parts: int) -> list[list[Piece]]:
    """Return for each part the pieces of variables that it updates, where all are dense."""
    return cut([(variable.size, variable.dtype.itemsize) for variable in variables], parts)


def _piece(array: Any, piece: Piece) -> Array:
    """Return a piece of an array: itself, where that is all."""
    if piece.end - piece.first == array.size:
        return array
    return array.reshape(-1)[piece.first : piece.end]


def all_finite(devices: Sequence[Device], gradients: Sequence[Gradient | None]) -> bool:
    """Whether gradients on some devices have neither a NaN nor an infinity; None is nothing."""
    alike: dict[tuple[Device, Any], list[Array]] = {}
    for device, array in _arrays(devices, gradients):
        alike.setdefault((device, array.dtype), []).append(array)
    return all(device.ops.first_nonfinite(some) == -1 for (device, _), some in alike.items())


def global_norm(
    devices: Sequence[Device],
    gradients: Sequence[Gradient | None],
    threads: int,
    of_all: Callable[[list[float]], list[float]] = list,
) -> float:
    """Return the norm of gradients on some devices, all in one; NaN where there are infinities.

    of_all: adds others' squares to these; the same bits wherever the gradients are, and with
    whomever. It is asked a second time for numbers that are too large to be squared.
    """
    pairs = _arrays(devices, gradients)
    squares = of_all([device.ops.sum_squares([array], threads=threads) for device, array in pairs])
    if all(map(math.isfinite, squares)):
        return math.sqrt(math.fsum(squares))
    squares = []  # those of a power of two of the numbers
    for device, array in pairs:
        small = device.allocate(array.shape, array.dtype)
        device.ops.sum([[small]], [[array]], scale=2.0**-600, threads=threads)
        squares.append(device.ops.sum_squares([small], threads=threads))
    squares = of_all(squares)
    finite = all(map(math.isfinite, squares))
    return math.sqrt(math.fsum(squares)) * 2.0**600 if finite else math.nan


def _arrays(
    devices: Sequence[Device], gradients: Sequence[Gradient | None]
) -> list[tuple[Device, Array]]:
    """Return where gradients lie, and the arrays of their numbers; None is nothing."""
    return [
        (device, gradient.values.array if isinstance(gradient, IndexedSlices) else gradient)
        for device, gradient in zip(devices, gradients, strict=True)
        if gradient is not None
    ]


def check_dtype(variable: Variable) -> None:
    """Raise ShapeError unless a variable is of a dtype that can be trained."""
    if is_narrow(variable.dtype):
        raise ShapeError(
            f"variable {variable.name!r} is {variable.dtype}, too coarse for small updates; keep "
            f"variables in float32 and give the model inputs of {variable.dtype}, in which it then "
            "computes"
        )
    if variable.dtype.kind != "f":
        raise ShapeError(
            f"variable {variable.name!r} is {variable.dtype}; an optimizer updates floating-point "
            "variables only, so leave it out"
        )


def _fitting(gradient: Any, variable: Variable) -> Gradient | None:
    """Return the array of a gradient, or the rows of it, that fits its variable."""
    check_dtype(variable)
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


def _limit(name: str, value: Any) -> float | None:
    if value is not None and number(name, value) == 0:
        raise UsageError(f"{name} must be above 0, for else nothing is left of a gradient")
    return None if value is None else float(value)


def _check_count(count: int | None) -> None:
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if count is not None and not (whole and count >= 0):
        raise UsageError(f"count is a number of examples and cannot be {count!r}")


def _component(gradient: Any, replica: int, n: int) -> Any:
    parts = local_results(gradient)
    if len(parts) not in (1, n):
        raise UsageError(f"a gradient has {len(parts)} components for {n} replicas")
    return parts[replica if len(parts) == n else 0]
