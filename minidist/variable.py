"""Variable: a name, a shape, and a copy of the value in each place where the policy wants one.

A variable belongs to the strategy it was created under; with none, to the default strategy, which
keeps one copy. Which copies there are, and which one a replica reads, its variable manager decides
(minidist.variable_mgr); here is what all of them have in common.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist import context, ops, tape
from minidist.device import Array, Device
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.tensor import Tensor, to_device
from minidist.values import DistributedValues, PerReplica, local_results, select_device_mirrored


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought into step."""

    AUTO = "auto"  # as the policy does it
    ON_WRITE = "on_write"  # the same


class VariableAggregation(enum.Enum):
    """How values that differ between replicas become the one that is assigned."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Copy:
    """One copy of a variable: an array on a device, and how often it was written."""

    __slots__ = ("array", "decays", "device", "name", "tensor", "version")

    def __init__(self, name: str, array: Array, device: Device, decays: bool) -> None:
        self.name = name
        self.array = array
        self.device = device
        self.tensor = Tensor(array, device)  # what reading it gives; follows the array's changes
        self.version = 0
        self.decays = decays

    def write(self, value: Tensor) -> None:
        """Put a value of the variable's shape and dtype, on this device, here."""
        self.device.copy(self.array, value.array)
        self.version += 1


Write = Callable[[Copy, Any], None]


class Reader:
    """Which tensor replica i computes with; see minidist.variable_mgr.read."""

    def read(self, replica: int, step: int) -> Tensor:
        raise NotImplementedError


class _Create(type):
    """`Variable(...)` asks the creator scopes, then the strategy, for a variable."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return create(*args, **kwargs)


class Variable(metaclass=_Create):
    """A value that training changes.

    `Variable(initial_value, name="w")`: the initial value is a number, an array, a Tensor, or a
    function without arguments that returns one. Under a strategy its copies live where the policy
    says; in a replica, creating one is a meeting of all replicas.

    dtype: float32 unless given or the initial value's own. trainable: whether optimizers and
    tapes look at it of their own accord. decays: whether weight decay applies.
    """

    __slots__ = (
        "__weakref__",
        "_reader",
        "aggregation",
        "copies",
        "decays",
        "dtype",
        "name",
        "shape",
        "strategy",
        "synchronization",
        "trainable",
    )

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    decays: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    strategy: Any
    copies: tuple[Copy, ...]
    _reader: Reader

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    def read(self) -> Tensor:
        """Return the value that the current context is about.

        In a replica it is what the policy lets the replica compute with; in an update the copy
        being updated; otherwise the first copy. The tensor follows later updates: `numpy()` takes
        a copy. Raises ContextError under a strategy that the variable does not belong to, unless
        it belongs to none.
        """
        frame = context.frame()
        if frame.replica is not None and frame.strategy is self.strategy:
            tensor = self._reader.read(frame.replica.replica_id, frame.step)
        elif frame.update_device is not None:
            tensor = self._copy_on(frame.update_device).tensor
        else:
            self._require_own_strategy("read")
            tensor = self.copies[0].tensor
        tape.read(self, tensor)
        return tensor

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the value in the host's memory."""
        tensor = self.read()
        return tensor.device.copy_out(tensor.array)

    def assign(self, value: Any) -> Variable:
        """Set the value; `assign_add` and `assign_sub` change it by one.

        A value is a number, an array or a Tensor of the variable's shape. In cross-replica context
        all copies get it, in an update the copy being updated. In a replica the values of all
        replicas are aggregated first, as `aggregation` says.
        Raises UsageError (a ValueError) in a replica when `aggregation` is NONE, ShapeError for
        another shape or dtype, TypeError for the mean of integers, and ContextError under a
        strategy that the variable does not belong to.
        """
        return self._assign(_assign, value)

    def assign_add(self, value: Any) -> Variable:
        """Add to the value; see `assign`."""
        return self._assign(_assign_add, value)

    def assign_sub(self, value: Any) -> Variable:
        """Subtract from the value; see `assign`."""
        return self._assign(_assign_sub, value)

    def _assign(self, write: Write, value: Any) -> Variable:
        frame = context.frame()
        if frame.update_device is not None:
            write(self._copy_on(frame.update_device), value)
            return self
        self._require_own_strategy("assigned")
        if (
            frame.replica is None
            or frame.strategy is not self.strategy
            or not context.has_strategy()
        ):
            self._write_all(write, value)
        elif self.aggregation is VariableAggregation.NONE:
            raise UsageError(
                f"variable {self.name!r} is assigned in replica {frame.replica.replica_id} but "
                "does not say what becomes of the replicas' different values; create it with "
                "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        else:
            frame.replica.merge_call(_aggregate, self, write, value)
        return self

    def _require_own_strategy(self, verb: str) -> None:
        """Check that no other strategy than the variable's is current; one of none may be read."""
        frame = context.frame()
        if frame.strategy is self.strategy or not context.has_strategy():
            return
        if verb == "read" and context.is_default(self.strategy):
            return
        raise ContextError(
            f"Mixing different Strategy objects: variable {self.name!r} belongs to "
            f"{self.strategy!r} and cannot be {verb} in {context.describe(frame)}; create it under "
            "that strategy's scope"
        )

    def _write_all(self, write: Write, value: Any) -> None:
        if isinstance(value, PerReplica):
            raise UsageError(
                f"variable {self.name!r} cannot be assigned a PerReplica value in cross-replica "
                "context; reduce it first"
            )
        for copy in self.copies:
            write(copy, select_device_mirrored(copy.device, value))

    def _copy_on(self, device: Device) -> Copy:
        for copy in self.copies:
            if copy.device is device:
                return copy
        raise UsageError(
            f"variable {self.name!r} has no copy on {device.short}; its copies are on "
            + ", ".join(copy.device.short for copy in self.copies)
        )

    def __repr__(self) -> str:
        where = ", ".join(copy.device.short for copy in self.copies)
        return f"<Variable {self.name!r} {self.dtype}{list(self.shape)} on {where}>"


ops.install_operators(Variable)


def _assign(copy: Copy, value: Any) -> None:
    copy.write(_fitting(copy, value))


def _assign_add(copy: Copy, value: Any) -> None:
    copy.write(copy.tensor + _fitting(copy, value))


def _assign_sub(copy: Copy, value: Any) -> None:
    copy.write(copy.tensor - _fitting(copy, value))


def _fitting(copy: Copy, value: Any) -> Tensor:
    """Return a value as a Tensor of the copy's shape and dtype on the copy's device."""
    if isinstance(value, Variable):
        value = value.read()
    if isinstance(value, Tensor):
        tensor = to_device(value, copy.device)
    else:
        array = np.asarray(value)
        if np.can_cast(array.dtype, copy.array.dtype, "same_kind"):
            array = array.astype(copy.array.dtype)
        tensor = Tensor(copy.device.copy_in(array), copy.device)
    if tensor.shape != tuple(copy.array.shape) or tensor.dtype != copy.array.dtype:
        raise ShapeError(
            f"variable {copy.name!r} is {copy.array.dtype}{list(copy.array.shape)} and cannot be "
            f"assigned a value that is {tensor.dtype}{list(tensor.shape)}; cast or reshape it first"
        )
    return tensor


def _aggregate(strategy: Any, variable: Variable, write: Any, value: Any) -> None:
    """Merge the replicas' values into one and write it to all copies."""
    how = variable.aggregation
    if how is VariableAggregation.MEAN and variable.dtype.kind in "iub":
        raise TypeError(
            f"variable {variable.name!r} is {variable.dtype}, and a mean is floating point; give "
            "it a floating-point dtype, or another aggregation than MEAN"
        )
    if how is VariableAggregation.ONLY_FIRST_REPLICA:
        value = local_results(value)[0]
    elif isinstance(value, DistributedValues):
        value = strategy.reduce(how.value, value)
    elif how is VariableAggregation.SUM and strategy.num_replicas > 1 and not _is_zero(value):
        raise UsageError(
            f"variable {variable.name!r} with aggregation SUM is assigned the same "
            f"non-DistributedValues value {value!r} in all replicas, which cannot be reduced: is "
            "it meant once, or once for each replica? Make a value in each replica, or use MEAN or "
            "ONLY_FIRST_REPLICA"
        )
    variable._write_all(local_results(write)[0], value)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


# --- creation -----------------------------------------------------------------------------------


def create(
    initial_value: Any,
    *,
    name: str | None = None,
    dtype: Any = None,
    trainable: bool = True,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    decays: bool = True,
) -> Variable:
    """Return a new variable of the current strategy; see Variable."""
    for option, kind in (
        (synchronization, VariableSynchronization),
        (aggregation, VariableAggregation),
    ):
        if not isinstance(option, kind):
            raise UsageError(
                f"variable {name!r}: {option!r} is no {kind.__name__}; it may be "
                + ", ".join(member.name for member in kind)
            )
    creator: Callable[..., Variable] = _by_strategy
    for scope in context.frame().creators:
        creator = _Asks(scope, creator)
    return creator(
        initial_value=initial_value,
        name=context.frame().name_scope + (name or "Variable"),
        dtype=dtype,
        trainable=trainable,
        synchronization=synchronization,
        aggregation=aggregation,
        decays=decays,
    )


class _Asks:
    """A creator scope that knows whom to ask next."""

    def __init__(self, scope: Callable[..., Variable], following: Callable[..., Variable]) -> None:
        self.scope, self.following = scope, following

    def __call__(self, **kwargs: Any) -> Variable:
        return self.scope(self.following, **kwargs)


def _by_strategy(**spec: Any) -> Variable:
    strategy = context.get_strategy()
    return strategy.create_variable(**spec)  # type: ignore[no-any-return]


def make(
    copies: Sequence[Copy],
    reader: Reader,
    strategy: Any,
    *,
    name: str,
    trainable: bool,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    decays: bool,
) -> Variable:
    """Put a variable together from its parts; variable managers call it."""
    variable: Variable = object.__new__(Variable)
    variable.name = name
    variable.shape = tuple(copies[0].array.shape)
    variable.dtype = copies[0].array.dtype
    variable.trainable = trainable
    variable.decays = decays
    variable.synchronization = synchronization
    variable.aggregation = aggregation
    variable.strategy = strategy
    variable.copies = tuple(copies)
    variable._reader = reader
    return variable
