"""Updating: call a function for each copy of a variable, in a context that is about this copy.

The context is cross-replica, of the strategy, on the copy's device, and `get_update_device` tells
that device: reads and assigns of the variable are those of the copy. One copy comes after the
other; nothing has been called yet when an argument turns out to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minidist import context
from minidist.destinations import devices_of
from minidist.device import Device
from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.reduction import differs
from minidist.regrouping import regroup
from minidist.structure import map_leaves
from minidist.sync_on_read import SyncOnReadVariable
from minidist.tensor import Tensor
from minidist.values import DistributedValues, Mirrored, PerReplica
from minidist.variable import Copy, Variable

if TYPE_CHECKING:
    from minidist.strategy import Strategy


def update(
    strategy: Strategy,
    variable: Variable,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: bool,
) -> Any:
    """Call `fn(variable, *args, **kwargs)` for each copy; see Strategy.update."""
    _check_own(strategy, variable, "update")
    own = isinstance(variable, SyncOnReadVariable)
    devices = [copy.device for copy in variable.copies]
    calls = [_select((args, kwargs), i, device, own) for i, device in enumerate(devices)]
    calls = [((variable, *args), kwargs) for args, kwargs in calls]
    results = _call_on(strategy, devices, fn, calls)
    wrap = PerReplica if differs(variable) else Mirrored
    return None if group else regroup(results, wrap, devices)


def update_non_slot(
    strategy: Strategy,
    variables: Variable | Sequence[Variable],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: bool,
) -> Any:
    """Call `fn(*args, **kwargs)` on each non-slot device; see Strategy.update_non_slot."""
    devices = _non_slot_devices(strategy, variables)
    calls = [_select((args, kwargs), i, device, False) for i, device in enumerate(devices)]
    results = _call_on(strategy, devices, fn, calls)
    return None if group else regroup(results, Mirrored, devices)


def group(value: Any) -> None:
    """Wait for the devices of everything in a structure; see Strategy.group."""

    def wait(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):
            for component in leaf.values:
                wait(component)
        elif isinstance(leaf, Variable | Copy | Tensor | IndexedSlices):
            for device in devices_of(leaf):
                device.synchronize()
        return leaf

    map_leaves(wait, value)


def colocated(strategy: Strategy, variable: Variable) -> context.entered:
    """Create variables beside another one; see Strategy.colocate_vars_with."""
    _check_own(strategy, variable, "colocate_vars_with")

    def create_beside(following: Callable[..., Variable], **kwargs: Any) -> Variable:
        return following(**{"beside": variable, **kwargs})

    return context.variable_creator_scope(create_beside)


def _check_own(strategy: Strategy, variable: Any, verb: str) -> None:
    if not isinstance(variable, Variable) or variable.strategy is not strategy:
        raise UsageError(f"{verb} takes a variable of {strategy!r}, not {variable!r}")


def _non_slot_devices(strategy: Strategy, variables: Any) -> list[Device]:
    """Return the devices of the first variable by name: all, where every replica has a copy."""
    several = [variables] if isinstance(variables, Variable) else list(variables)
    if not several:
        raise UsageError("update_non_slot got no variables, so there are no devices to run on")
    for variable in several:
        _check_own(strategy, variable, "update_non_slot")
    first = min(several, key=lambda variable: variable.name)
    return [copy.device for copy in first.copies]


def _call_on(
    strategy: Strategy,
    devices: Sequence[Device],
    fn: Callable[..., Any],
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
) -> list[Any]:
    results = []
    for device, (args, kwargs) in zip(devices, calls, strict=True):
        with context.entered(strategy=strategy, replica=None, device=device, update_device=device):
            results.append(fn(*args, **kwargs))
    return results


def _select(arguments: Any, i: int, device: Device, by_replica: bool) -> Any:
    """Return what the call for copy `i`, on `device`, gets of a structure of arguments."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            if by_replica:
                return leaf.of_replica(i)
            raise TypeError(
                f"a PerReplica value has no one component for {device.short}: {leaf!r}; reduce it "
                "first, or pass it through strategy.run"
            )
        if isinstance(leaf, Mirrored):
            if device not in (leaf.devices or ()):
                raise UsageError(
                    f"the copy on {device.short} has no component of {leaf!r}; reduce or broadcast "
                    "it with destinations=variable"
                )
            return leaf.get(device)
        return leaf

    return map_leaves(pick, arguments)
