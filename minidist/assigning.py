"""Assigning: what a copy of a variable becomes, and how what the replicas assign becomes one value.

All results are computed before the first is written, so a value may be what a copy reads as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist import context, tape
from minidist.comm.sharing import of_first
from minidist.creation import VariableAggregation
from minidist.device import Device
from minidist.dtypes import as_array, kind
from minidist.errors import MergeMismatchError, ShapeError, UsageError
from minidist.tensor import Tensor, to_device
from minidist.values import DistributedValues, Mirrored, local_results

if TYPE_CHECKING:
    from minidist.variable import Copy, Variable

Change = Callable[["Copy", Any], Tensor]  # what a copy becomes when it is given a value


def put(copies: Sequence[Copy], change: Change, value: Any) -> None:
    """Change copies by a value that is meant for all of them."""
    with tape.stop_recording():
        results = [change(copy, value) for copy in copies]
    for copy, result in zip(copies, results, strict=True):
        copy.write(result)


def follow(copies: Sequence[Copy], mean: Tensor, momentum: float) -> None:
    """Let a moving average take in a mean over all replicas."""
    first = copies[0]
    new = first.device.allocate(first.shape, first.dtype)
    values = [[first.array], [to_device(mean, first.device).array]]
    first.device.ops.sum([[new]], values, weights=[momentum, 1 - momentum])
    for copy in copies:
        copy.write(Tensor(new, first.device))


def assigned(copy: Copy, value: Any) -> Tensor:
    return fitting(copy, value)


def added(copy: Copy, value: Any) -> Tensor:
    return copy.tensor + fitting(copy, value)


def subtracted(copy: Copy, value: Any) -> Tensor:
    return copy.tensor - fitting(copy, value)


def fitting(copy: Copy, value: Any) -> Tensor:
    """Return a value as a Tensor of the copy's shape and dtype on the copy's device."""
    value = _component(value, copy.device)
    if isinstance(value, Tensor):
        tensor = to_device(value, copy.device)
    else:
        array = _cast(copy, np.asarray(value))
        tensor = Tensor(copy.device.copy_in(array), copy.device)
    if tensor.shape != tuple(copy.array.shape) or tensor.dtype != copy.array.dtype:
        raise ShapeError(
            f"variable {copy.name!r} is {copy.array.dtype}{list(copy.array.shape)} and cannot be "
            f"assigned a value that is {tensor.dtype}{list(tensor.shape)}; cast or reshape it first"
        )
    return tensor


def _cast(copy: Copy, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in the copy's dtype, if it is of its kind and, of integers, in its range."""
    dtype = copy.array.dtype
    if kind(array.dtype) not in "biuf":
        raise UsageError(
            f"variable {copy.name!r} cannot be assigned {array.dtype}; give numbers or booleans"
        )
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        return array
    cast = as_array(array, dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, array):
        raise UsageError(
            f"variable {copy.name!r} is {dtype} and cannot hold {array!r}; give it a wider dtype"
        )
    return cast


def _component(value: Any, device: Device) -> Any:
    """Return what of a variable or distributed value a copy on this device is to get.

    That is the component which the context is about, and in cross-replica context the one on the
    device; a Mirrored value without one there has the same value in another place.
    """
    if isinstance(value, Mirrored) and context.in_cross_replica_context():
        with context.entered(device=device, update_device=None):
            value = value.get()
    elif isinstance(value, DistributedValues):
        value = value.get()
    if hasattr(value, "read"):
        with context.entered(device=device):
            value = value.read()
    return value


def assign_together(
    variable: Variable, replica: context.ReplicaContext, change: Change, value: Any
) -> None:
    """Meet the other replicas, aggregate what all assign, and write the result to all copies."""
    if variable.aggregation is VariableAggregation.NONE:
        raise UsageError(
            f"variable {variable.name!r} is assigned in replica {replica.replica_id} but "
            "does not say what becomes of the replicas' different values; create it with "
            "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        )
    value = _component(value, replica.device)
    if variable.aggregation is VariableAggregation.SUM and type(value) is int:
        # Python has one object for each small whole number: that two replicas count the same
        # would look as if they shared one. A count is each replica's own.
        value = _cast(variable.copies[0], np.asarray(value))
    replica.merge_call(_aggregate, variable, change, value)


def _aggregate(strategy: Any, variable: Any, change: Any, value: Any) -> None:
    """Merge the replicas' values into one and write it to all copies."""
    for given, what in ((variable, "different variables"), (change, "in different ways")):
        if isinstance(given, DistributedValues):
            raise MergeMismatchError(
                f"the replicas assign {what}: {', '.join(map(_name, local_results(given)))}; all "
                "replicas must make the same assignments in the same order"
            )
    how = variable.aggregation
    if how is VariableAggregation.MEAN and variable.dtype.kind in "iub":
        raise TypeError(
            f"variable {variable.name!r} is {variable.dtype}, and a mean is floating point; give "
            "it a floating-point dtype, or another aggregation than MEAN"
        )
    several = strategy.site.peers.count > 1
    if how is VariableAggregation.ONLY_FIRST_REPLICA:
        value = local_results(value)[0]
        if several:
            what = f"assign the first replica's value to {variable.name!r}"
            value = of_first(strategy.site.peers, what, value)
    elif isinstance(value, DistributedValues) or several:
        what = f"assigned to {variable.name!r}"
        (value,) = strategy._reduce_pairs(how.value, [(value, variable)], what)
    elif how is VariableAggregation.SUM and strategy.num_replicas > 1 and not _is_zero(value):
        raise UsageError(
            f"variable {variable.name!r} with aggregation SUM is assigned the same "
            f"non-DistributedValues value {value!r} in all replicas, which cannot be reduced: is "
            "it meant once, or once for each replica? Make a value in each replica, or use MEAN or "
            "ONLY_FIRST_REPLICA"
        )
    variable.reader.change(variable.copies, change, value)


def _name(given: Any) -> str:
    return repr(given.name) if hasattr(given, "name") else str(given.__name__)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0
