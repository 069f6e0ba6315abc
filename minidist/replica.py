"""Replica: what a function in `run` finds as its context, and its way to the other replicas.

`merge_call` is that way; `all_reduce` is a meeting too, and one that a tape can walk back through.
The run that replicas belong to, and how it ends, is in minidist.run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minidist import context, diagnosis, observe
from minidist.device.base import Array
from minidist.dtypes import kind
from minidist.errors import ContextError, MergeMismatchError
from minidist.indexed_slices import IndexedSlices
from minidist.structure import fill, leaves, map_leaves
from minidist.tape import Need, record
from minidist.tensor import Tensor
from minidist.values import Mirrored, PerReplica, local_results

if TYPE_CHECKING:
    from minidist.device import Device
    from minidist.run import Run


class Replica:
    """One replica of a run: who it is, and the way to the others.

    replica_id: its number among the replicas in sync, of all machines; local_id: among those of
    this process.
    """

    __slots__ = ("_run", "device", "local_id", "replica_id")

    def __init__(self, run: Run, local_id: int, device: Device) -> None:
        self._run = run
        self.local_id = local_id
        self.replica_id = run.strategy.first_replica + local_id
        self.device = device

    @property
    def num_replicas(self) -> int:
        """How many replicas there are in sync, on all machines."""
        return int(self.strategy.num_replicas)

    @property
    def strategy(self) -> Any:
        return self._run.strategy

    def merge_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(strategy, *args, **kwargs)` once for all replicas, in cross-replica context.

        Every replica must call it, the same number of times and with the same function. `fn` gets
        the replicas' arguments regrouped (PerReplica where they differ); each replica gets its own
        component of the result. What `fn` raises ends the run. Tapes do not see through it, as they
        do through all_reduce.

        Raises ContextError (a RuntimeError) where this is not the calling thread's replica.
        """
        frame = context.frame()
        if frame.replica is not self:
            raise not_active(self, frame)
        return self._run.meet(self.local_id, fn, args, kwargs, frame)

    def all_reduce(self, op: Any, value: Any) -> Any:
        """Return the sum or mean over the replicas of each leaf of a structure.

        op: ReduceOp.SUM or MEAN, "sum" or "mean". Each replica brings Tensors, variables, arrays
        and numbers of its own, and gets the result where its Tensor is, or else on its own device.

        A tape can differentiate it. The gradient is all_reduce, with the same op, of the gradients
        that the replicas have of the result: that of the sum of all replicas' targets. So taking it
        is a meeting, which all replicas must come to.
        Raises what Strategy.reduce raises, StructureError (a ValueError) where the replicas'
        structures differ, and MergeMismatchError where their operations do.
        """
        number = self._run.meetings_of[self.local_id]
        line = diagnosis.users_line() if observe.careful() else ""
        brought = map_leaves(lambda leaf: _Brought.of(leaf, op, number, line), value)
        result = self.merge_call(_all_reduce, brought)
        pairs = zip(leaves(brought), leaves(result), strict=True)
        return fill(result, [self._noted(i, *pair) for i, pair in enumerate(pairs)])

    def _noted(self, leaf: int, brought: _Brought, result: Any) -> Any:
        """Return a leaf's result, once tapes have noted how it came from what was brought."""
        value = brought.value
        if not isinstance(value, Tensor) or kind(value.dtype) != "f":
            return result

        def backward(dy: Array, _: Sequence[Need]) -> list[Array]:
            number = f"{brought.number}, for the gradient of its leaf {leaf}"
            upstream = _Brought(Tensor(dy, result.device), brought.op, number)
            reduced: Tensor = self.merge_call(_all_reduce, upstream)
            return [reduced.array]

        return record(result.array, (value,), backward)

    def __repr__(self) -> str:
        return f"<replica {self.replica_id} of {self.num_replicas} on {self.device.short}>"


def not_active(replica: context.ReplicaContext, frame: context.Frame) -> ContextError:
    """Return the error for a replica context that is not the one of the calling thread."""
    what = f"merge_call of {replica!r} was called in {context.describe(frame)}"
    if frame.replica is None:
        return ContextError(
            f"{what}; merge_call must be used inside run, in a replica, and not inside a merge "
            "function: what that does is done for all replicas already"
        )
    which = "ReplicaContext" if frame.strategy is replica.strategy else "strategies"
    return ContextError(
        f"Mismatching {which}: {what}; call it on the replica's own thread, on what "
        "get_replica_context() returns there"
    )


class _Brought:
    """What one replica brings of a leaf to an all_reduce.

    `number` says which one it is, `name` whose value, where it is a variable's, and `line` where it
    is brought: looked at only in the checking mode, since a program may do it in two branches.
    """

    __slots__ = ("line", "name", "number", "op", "value")

    def __init__(
        self, value: Any, op: Any, number: int | str, name: str | None = None, line: str = ""
    ) -> None:
        self.value, self.op, self.number, self.name, self.line = value, op, number, name, line

    @classmethod
    def of(cls, leaf: Any, op: Any, number: int, line: str) -> _Brought:
        variable = getattr(leaf, "container", leaf)  # of one of its copies
        name = getattr(variable, "name", None) if hasattr(leaf, "read") else None
        return cls(own_value(leaf), op, number, name, line)

    def is_like(self, other: _Brought) -> bool:
        """Whether the two can be meant to be reduced with each other."""
        named = self.name is not None and other.name is not None
        return (self.op, self.number, self.line) == (other.op, other.number, other.line) and not (
            named and self.name != other.name
        )

    def __str__(self) -> str:
        what = f" of variable {self.name!r}" if self.name is not None else ""
        where = f" at {self.line}" if self.line else ""
        return f"the {self.op}{what} in meeting {self.number}{where}"


def own_value(leaf: Any) -> Any:
    """Return what a replica brings of a variable: what it reads. Anything else as it is."""
    return leaf.read() if hasattr(leaf, "read") else leaf


def _all_reduce(strategy: Any, brought: Any) -> Any:
    """Reduce all leaves in one pass, and give each replica its own."""
    devices: Sequence[Device] = strategy.devices
    pairs, details = [], []
    op: Any = "sum"
    for leaf in leaves(brought):
        parts: Sequence[_Brought] = local_results(leaf)
        op = parts[0].op
        for replica, part in enumerate(parts, strategy.first_replica):
            if not part.is_like(parts[0]):
                raise MergeMismatchError(
                    f"the replicas all_reduce different things: replica {strategy.first_replica} "
                    f"{parts[0]}, and replica {replica} {part}; all must reduce the same, and take "
                    "gradients of the same, in the same order"
                )
        if strategy.num_replicas > len(devices):
            details.append(str(parts[0]))
        values = [part.value for part in parts]
        pairs.append((PerReplica(devices, values), _places(values, devices)))
    totals = strategy._reduce_pairs(op, pairs, *details)
    return fill(
        brought,
        [_dealt(total, places, devices) for total, (_, places) in zip(totals, pairs, strict=True)],
    )


def _places(values: Sequence[Any], devices: Sequence[Device]) -> list[Device]:
    """Return where each replica wants the result."""
    return [
        value.device if isinstance(value, Tensor | IndexedSlices) else device
        for value, device in zip(values, devices, strict=True)
    ]


def _dealt(total: Any, places: Sequence[Device], devices: Sequence[Device]) -> Any:
    """Return each replica's component of a total; numbers as they are.

    Replicas that want it on the same device get copies: tapes add to the gradients they are given.
    """
    if not isinstance(total, Tensor | IndexedSlices | Mirrored):
        return total
    components = []
    for replica, device in enumerate(places):
        component = total.get(device) if isinstance(total, Mirrored) else total
        if device in places[:replica] and isinstance(component, Tensor):
            component = Tensor(device.ops.copy(component.array), device)
        components.append(component)
    return PerReplica(devices, components)
