"""Variable: a name, a shape, and a copy of the value in each place where the policy wants one.

A variable belongs to the strategy it was created under; with none, to the default strategy. Which
copies there are, and which one a replica reads, its variable manager decides
(minidist.variable_mgr). What assigning means in a replica is what tells the kinds apart:

| kind | copies | assigned in a replica | read for all replicas |
|---|---|---|---|
| Variable, of one replica | one | as it is | the copy |
| AggregatingVariable | one | the replicas' values are aggregated, then written once | the copy |
| MirroredVariable | every replica's | aggregated, then written to all | the near copy |
| SyncOnReadVariable (sync_on_read.py) | every replica's | only its own copy | all, aggregated |
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from minidist import context, observe, tape
from minidist.assigning import (
    Change,
    added,
    assign_together,
    assigned,
    follow,
    put,
    subtracted,
)
from minidist.creation import VariableAggregation, VariableSynchronization, create
from minidist.device import Array, Device
from minidist.device import get as get_device
from minidist.errors import ContextError, UsageError
from minidist.readable import Readable
from minidist.tensor import Reading, Tensor, to_device
from minidist.values import PerReplica


class Copy(Readable):
    """One copy of a variable: an array on a device, and how often it was written."""

    __slots__ = ("_container", "array", "decays", "device", "name", "tensor", "version")

    def __init__(self, name: str, array: Array, device: Device, decays: bool) -> None:
        self.name = name
        self.array = array
        self.device = device
        self.tensor = Reading(array, device)
        self.version = 0
        self.decays = decays
        self._container: Callable[[], Variable | None] = lambda: None

    @property
    def container(self) -> Variable | None:
        """The variable that this is a copy of, or None when it is no more."""
        return self._container()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tensor.dtype

    def read(self) -> Tensor:
        """Return the value of this copy, whatever the context."""
        return self.tensor

    def write(self, value: Tensor) -> None:
        """Put a value of the variable's shape and dtype, on this device, here."""
        variable = self.container
        if variable is not None:
            variable.reader.before_write()
        self.device.copy(self.array, value.array)
        if observe.counting:
            observe.moved(value.device.short, self.device.short, self.array.nbytes, "values")
        self.version += 1

    def __repr__(self) -> str:
        return f"<Copy {self.name!r} on {self.device.short}>"


class Reader(ABC):
    """What replicas read of a variable, and what becomes of what they assign to it.

    See minidist.variable_mgr.read.
    """

    @abstractmethod
    def read(self, replica: int, step: int) -> Tensor:
        """Return what a replica computes with in a step."""

    @abstractmethod
    def version(self, replica: int) -> int:
        """Return the version of the copy that `read` has given the replica last."""

    def newest(self, replica: int, step: int) -> Tensor:
        """Return the variable's value on a replica's device, though the replica reads an older."""
        return self.read(replica, step)

    def before_write(self) -> None:
        """Wait until nobody copies the variable's value any more: it is about to change."""
        return

    def change(self, copies: Sequence[Copy], change: Change, value: Any) -> None:
        """Do what the replicas, or the only one, have assigned."""
        put(copies, change, value)

    def follow(self, copies: Sequence[Copy], mean: Tensor, momentum: float) -> None:
        """Let a moving average take in a mean over all replicas."""
        follow(copies, mean, momentum)


class _Create(type):
    """`Variable(...)` asks the creator scopes, then the strategy, for a variable."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Variable:
            raise TypeError(
                f"a {cls.__name__} is made by md.Variable(...), where the strategy and the "
                "synchronization ask for that kind"
            )
        return create(*args, **kwargs)


class Variable(Readable, metaclass=_Create):
    """A value that training changes.

    `Variable(initial_value, name="w")`: the initial value is a number, an array, a Tensor, or a
    function without arguments that returns one. Under a strategy its copies live where the policy
    says; in a replica, creating one is a meeting of all replicas.

    dtype: the initial value's own, or where Python's floats have none the default one, float32.
    trainable: whether optimizers and tapes look at it of their own accord; by default, unless it
    is ON_READ. synchronization: AUTO, or ON_READ for a copy of each replica's own. aggregation:
    how the replicas' values become one.
    decays: whether weight decay applies.
    """

    __slots__ = (
        "__weakref__",
        "aggregation",
        "copies",
        "decays",
        "dtype",
        "name",
        "reader",
        "seen",
        "shape",
        "strategy",
        "synchronization",
        "trainable",
    )

    everywhere: ClassVar[bool] = False  # whether every replica has a copy

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    decays: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    strategy: Any
    copies: tuple[Copy, ...]
    reader: Reader
    seen: dict[int, int]  # which version each replica has read last; noted while somebody watches

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        return self.strategy

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    def is_initialized(self) -> bool:
        """Return True: all copies hold a value from the moment that there is a variable."""
        return True

    # --- copies

    def get(self, device: str | Device | None = None) -> Copy:
        """Return the copy on `device`, or the one that the current context is about.

        In a replica it is the replica's own, in an update the one being updated; otherwise the
        one on the current device, or the first. Where there is one copy only, it is always that.
        Raises UsageError (a ValueError) for a device without a copy.
        """
        if device is not None:
            return self._on(get_device(device))
        self.require_own_strategy("read")
        frame = context.frame()
        copy = self._current(frame)
        return self._near(frame.device) if copy is None else copy

    @property
    def handle(self) -> Copy:
        """The copy that this replica, or this update, is about.

        Raises UsageError (a ValueError) in cross-replica context, where it would be any of several.
        """
        copy = self._current(context.frame())
        if copy is None:
            raise UsageError(
                f"variable {self.name!r} has no single handle in {context.describe()}; take it in "
                "a replica or an update, or a copy by get(device)"
            )
        return copy

    def _current(self, frame: context.Frame) -> Copy | None:
        """Return the copy that a replica or an update is about; None where it is about all."""
        if not self.everywhere:
            return self.copies[0]
        if frame.strategy is self.strategy:
            if frame.replica is not None:
                return self.copies[frame.replica.local_id]
            if frame.update_device is not None:
                return self._on(frame.update_device)
        return None

    def _near(self, device: Device) -> Copy:
        return next((copy for copy in self.copies if copy.device is device), self.copies[0])

    def _on(self, device: Device) -> Copy:
        copy = self._near(device)
        if copy.device is not device and self.everywhere:
            raise UsageError(
                f"variable {self.name!r} has no copy on {device.short}; its copies are on "
                + ", ".join(copy.device.short for copy in self.copies)
            )
        return copy

    # --- reading

    def read(self) -> Tensor:
        """Return the value that the current context is about.

        In a replica it is what the policy lets the replica compute with; in an update the copy
        being updated; otherwise the value for all replicas, on the current device. The tensor
        follows later updates (except where it was aggregated or brought from another device):
        `numpy()` takes a copy.
        Raises ContextError under a strategy that the variable does not belong to, unless it
        belongs to none, and UsageError (a ValueError) where the copies should be aggregated and
        `aggregation` does not say how.
        """
        frame = context.frame()
        if frame.replica is not None and frame.strategy is self.strategy:
            read = self.reader.newest if frame.newest else self.reader.read
            tensor = read(frame.replica.local_id, frame.step)
            if observe.counting and not frame.newest:
                replica = frame.replica.local_id
                self.seen[replica] = self.reader.version(replica)
        else:
            self.require_own_strategy("read")
            copy = self._current(frame) if self.everywhere or frame.update_device else None
            tensor = self._read_for_all(frame.device) if copy is None else copy.tensor
        tape.read(self, tensor)
        return tensor

    def read_value(self) -> Tensor:
        """Return what `read` returns."""
        return self.read()

    def _read_for_all(self, device: Device) -> Tensor:
        return to_device(self._near(device).tensor, device)

    # --- assigning

    def assign(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Variable:
        """Set the value; `assign_add` and `assign_sub` change it by one. Return the variable.

        A value is a number, an array or a Tensor of the variable's shape; of a variable, and of
        a PerReplica or Mirrored value, it is the component that the context is about. In
        cross-replica context all copies get it, in an update the copy being updated. What a
        replica assigns is aggregated with what the others assign, as `aggregation` says, and
        all copies get the result; see SyncOnReadVariable for those that are each replica's own,
        and variable_mgr/staged.py for what `staged_vars` does with additions in replicas.

        use_locking, name, read_value: taken for programs that pass them; they change nothing.

        Raises UsageError (a ValueError) in a replica when `aggregation` is NONE, ShapeError for
        another shape or dtype, TypeError for the mean of integers, MergeMismatchError where the
        replicas assign differently, and ContextError under a strategy that the variable does not
        belong to.
        """
        return self._assign(assigned, value)

    def assign_add(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Variable:
        """Add to the value; see `assign`."""
        return self._assign(added, value)

    def assign_sub(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Variable:
        """Subtract from the value; see `assign`."""
        return self._assign(subtracted, value)

    def _assign(self, change: Change, value: Any) -> Variable:
        self.require_own_strategy("assigned")
        frame = context.frame()
        if frame.strategy is self.strategy and frame.replica is not None:
            self._assign_in_replica(frame.replica, change, value)
        elif frame.strategy is self.strategy and frame.update_device is not None:
            self._require_places_of_their_own()
            put([self._on(frame.update_device)], change, value)
        elif isinstance(value, PerReplica):
            raise UsageError(
                f"variable {self.name!r} cannot be assigned a PerReplica value in cross-replica "
                "context; reduce it first"
            )
        else:
            with self.strategy.scope():  # which may be open already
                self._assign_for_all(change, value)
        return self

    def _require_places_of_their_own(self) -> None:
        """Check that what an update assigns of one copy leaves the others as they are."""
        if self.everywhere and any(copy.array is self.copies[0].array for copy in self.copies[1:]):
            raise UsageError(
                f"an update assigns {self.name!r}, which an optimizer keeps in one place for all "
                "replicas: it would change once for each of them; assign it outside of the update"
            )

    def _assign_in_replica(
        self, replica: context.ReplicaContext, change: Change, value: Any
    ) -> None:
        self.reader.change(self.copies, change, value)

    def _assign_for_all(self, change: Change, value: Any) -> None:
        put(self.copies, change, value)

    def require_own_strategy(self, verb: str) -> None:
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

    # --- saving

    def to_save(self) -> np.ndarray[Any, Any]:
        """Return what a checkpoint holds: the value for all replicas, copied to the host.

        Raises ContextError in a replica.
        """
        self._require_all("saved")
        tensor = self._read_for_all(self.copies[0].device)
        return tensor.device.copy_out(tensor.array)

    def restore(self, value: np.ndarray[Any, Any]) -> None:
        """Put what `to_save` returned, perhaps under another strategy, into all copies.

        Raises ShapeError for another shape or kind of dtype, and ContextError in a replica.
        """
        self._require_all("restored")
        self._assign_for_all(assigned, value)

    def _require_all(self, verb: str) -> None:
        self.require_own_strategy(verb)
        if context.has_strategy() and not context.in_cross_replica_context():
            raise ContextError(
                f"variable {self.name!r} cannot be {verb} in {context.describe()}, where it is one "
                "replica's; do it outside run, or inside merge_call"
            )

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"variable {self.name!r} cannot be copied without its values; use copy.deepcopy, or "
            "create another one from its value"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a variable with copies of the copies. In a replica this is a meeting."""
        frame = context.frame()
        if frame.replica is not None and frame.strategy is self.strategy:
            return frame.replica.merge_call(_twin, self)  # type: ignore[no-any-return]
        return _twin(self.strategy, self)

    def __repr__(self) -> str:
        where = ", ".join(copy.device.short for copy in self.copies)
        return f"<{type(self).__name__} {self.name!r} {self.dtype}{list(self.shape)} on {where}>"


class AggregatingVariable(Variable):
    """One copy that several replicas share."""

    __slots__ = ()

    def _assign_in_replica(
        self, replica: context.ReplicaContext, change: Change, value: Any
    ) -> None:
        assign_together(self, replica, change, value)


class MirroredVariable(Variable):
    """A copy with every replica, all changed together."""

    __slots__ = ()
    everywhere = True

    def _assign_in_replica(
        self, replica: context.ReplicaContext, change: Change, value: Any
    ) -> None:
        assign_together(self, replica, change, value)


# --- putting together ---------------------------------------------------------------------------


def make(
    kind: type[Variable],
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
    variable: Variable = object.__new__(kind)
    variable.name = name
    variable.shape = tuple(copies[0].array.shape)
    variable.dtype = copies[0].array.dtype
    variable.trainable = trainable
    variable.decays = decays
    variable.synchronization = synchronization
    variable.aggregation = aggregation
    variable.strategy = strategy
    variable.copies = tuple(copies)
    variable.reader = reader
    variable.seen = {}
    for copy in copies:
        copy._container = weakref.ref(variable)
    return variable


def _twin(strategy: Any, variable: Variable) -> Variable:
    return strategy.variable_mgr.twin(variable)  # type: ignore[no-any-return]
