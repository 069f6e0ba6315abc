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

from minidist import context, tape
from minidist.device import Array, Device
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.tensor import Tensor
from minidist.values import DistributedValues, PerReplica, local_results, select_device_mirrored


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought into step."""

    AUTO = "auto"             # as the policy does it
    ON_WRITE = "on_write"     # the same


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
        self.tensor = Tensor(array, device)      # what reading it gives; follows the array's changes
        self.version = 0
        self.decays = decays

    def write(self, value: Any) -> None:
        """Put a value (Tensor, array of the host or number) of the variable's shape here."""
        source = value.array if isinstance(value, Tensor) else np.asarray(value, self.array.dtype)
        if tuple(source.shape) != tuple(self.array.shape):
            raise ShapeError(
                f"assigning to variable {self.name!r} of shape {tuple(self.array.shape)} a value of shape "
                f"{tuple(source.shape)}"
            )
        self.device.copy(self.array, source)
        self.version += 1


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

    __slots__ = ("__weakref__", "_reader", "aggregation", "copies", "decays", "dtype", "name", "shape", "strategy",
                 "synchronization", "trainable")

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

        In a replica it is what the policy lets the replica compute with; in an update the copy being
        updated; otherwise the first copy. The tensor follows later updates: `numpy()` takes a copy.
        """
        frame = context.frame()
        if frame.replica is not None and frame.strategy is self.strategy:
            tensor = self._reader.read(frame.replica.replica_id, frame.step)
        elif frame.update_device is not None:
            tensor = self._copy_on(frame.update_device).tensor
        else:
            tensor = self.copies[0].tensor
        tape.read(self, tensor)
        return tensor

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the value in the host's memory."""
        tensor = self.read()
        return tensor.device.copy_out(tensor.array)

    def assign(self, value: Any) -> Variable:
        """Set the value; `assign_add` and `assign_sub` change it by one.

        In cross-replica context all copies get it, in an update the copy being updated. In a
        replica the values of all replicas are aggregated first, as `aggregation` says.
        Raises UsageError (a ValueError) in a replica when `aggregation` is NONE, and ShapeError for
        another shape.
        """
        return self._assign(_assign, value)

    def assign_add(self, value: Any) -> Variable:
        """Add to the value; see `assign`."""
        return self._assign(_assign_add, value)

    def assign_sub(self, value: Any) -> Variable:
        """Subtract from the value; see `assign`."""
        return self._assign(_assign_sub, value)

    def _assign(self, write: Callable[[Copy, Any], None], value: Any) -> Variable:
        frame = context.frame()
        if frame.update_device is not None:
            write(self._copy_on(frame.update_device), value)
        elif frame.replica is None or not context.has_strategy():
            self._write_all(write, value)
        elif frame.strategy is not self.strategy:
            raise ContextError(
                f"variable {self.name!r} belongs to {self.strategy!r} and cannot be assigned in "
                f"{context.describe(frame)}: create it under that strategy's scope"
            )
        elif self.aggregation is VariableAggregation.NONE:
            raise UsageError(
                f"variable {self.name!r} is assigned in replica {frame.replica.replica_id} but does not say what "
                "becomes of the replicas' different values; create it with aggregation="
                "VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        else:
            frame.replica.merge_call(_aggregate, self, write, value)
        return self

    def _write_all(self, write: Callable[[Copy, Any], None], value: Any) -> None:
        if isinstance(value, PerReplica):
            raise UsageError(
                f"variable {self.name!r} cannot be assigned a PerReplica value in cross-replica context; "
                "reduce it first"
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


def _assign(copy: Copy, value: Any) -> None:
    copy.write(_plain(value))


def _assign_add(copy: Copy, value: Any) -> None:
    copy.write(copy.tensor + _plain(value))


def _assign_sub(copy: Copy, value: Any) -> None:
    copy.write(copy.tensor - _plain(value))


def _plain(value: Any) -> Any:
    return value.read() if isinstance(value, Variable) else value


def _aggregate(strategy: Any, variable: Variable, write: Callable[[Copy, Any], None], value: Any) -> None:
    """Merge the replicas' values into one and write it to all copies."""
    write_fn = local_results(write)[0]
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        value = local_results(value)[0]
    elif isinstance(value, DistributedValues):
        value = strategy.reduce(variable.aggregation.value, value)
    elif variable.aggregation is VariableAggregation.SUM and strategy.num_replicas > 1 and value != 0:
        raise UsageError(
            f"variable {variable.name!r} with aggregation SUM is assigned the same plain value {value!r} in all "
            "replicas, which cannot be reduced: is it meant once, or once for each replica? Pass a tensor, or use "
            "MEAN or ONLY_FIRST_REPLICA"
        )
    variable._write_all(write_fn, value)


# --- creation -----------------------------------------------------------------------------------


def create(
    initial_value: Any, *, name: str | None = None, dtype: Any = None, trainable: bool = True,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE, decays: bool = True,
) -> Variable:
    """Return a new variable of the current strategy; see Variable."""
    for option, kind in ((synchronization, VariableSynchronization), (aggregation, VariableAggregation)):
        if not isinstance(option, kind):
            raise UsageError(
                f"variable {name!r}: {option!r} is no {kind.__name__}; it may be "
                + ", ".join(member.name for member in kind)
            )
    creator: Callable[..., Variable] = _by_strategy
    for scope in context.frame().creators:
        creator = _Asks(scope, creator)
    return creator(
        initial_value=initial_value, name=context.frame().name_scope + (name or "Variable"), dtype=dtype,
        trainable=trainable, synchronization=synchronization, aggregation=aggregation, decays=decays,
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
    copies: Sequence[Copy], reader: Reader, strategy: Any, *, name: str, trainable: bool,
    synchronization: VariableSynchronization, aggregation: VariableAggregation, decays: bool,
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


# --- moving averages ----------------------------------------------------------------------------


def assign_moving_averages(
    variables: Sequence[Variable], values: Sequence[Tensor], momentum: float, count: int
) -> None:
    """Let each variable follow the mean of its value over all replicas, weighted by their counts.

    v = momentum·v + (1 − momentum)·Σ(c_i·x_i)/Σc_i. `count` is the number of examples behind this
    replica's values. All variables of a call meet once. Where no replica has an example, nothing
    changes.
    """
    replica = context.get_replica_context()
    if replica is None:
        raise ContextError("moving averages are updated in a replica; call the layer inside strategy.run")
    replica.merge_call(_average, tuple(variables), tuple(values), momentum, _Count(count))


class _Count:
    """A number of examples that is each replica's own, also where they are equal."""

    def __init__(self, value: int) -> None:
        self.value = value


def _average(
    strategy: Any, variables: tuple[Variable, ...], values: tuple[Any, ...], momentum: float, counts: Any
) -> None:
    weights = [count.value for count in local_results(counts)]
    total = sum(weights)
    if total == 0:
        return
    momentum = local_results(momentum)[0]
    for variable, value in zip(variables, values, strict=True):
        parts = [w * part.numpy() for w, part in zip(weights, local_results(value), strict=True) if w]
        mean = sum(parts[1:], parts[0]) / total
        new = momentum * variable.copies[0].tensor.numpy() + (1 - momentum) * mean
        for copy in variable.copies:
            copy.write(new)
