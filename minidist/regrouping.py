"""Regroup: from what each replica holds to one structure for all of them.

The replicas' structures, in replica order, become one whose leaves are per-replica values;
minidist.structure says what has parts. What is the very same object in every replica stays as it
is: identity, not equality, says that something is shared. And copies of one variable become the
variable again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from minidist.device_map import DeviceMap, replica_map
from minidist.errors import StructureError
from minidist.structure import Node, describe, map_leaves, node
from minidist.values import Devices, PerReplica, local_results

Wrap = Callable[[DeviceMap | None, Sequence[Any]], Any]
How = Callable[[tuple[Any, ...], Wrap, DeviceMap | None, frozenset[type]], Any]

# Of small numbers and truth values Python has one object each: that two replicas have the same one
# says nothing.
_NUMBERS = frozenset({bool, int, float, complex, np.bool_})
_NONE: frozenset[type] = frozenset()


def regroup(
    values: Sequence[Any],
    wrap: Wrap = PerReplica,
    devices: Devices = None,
    *,
    numbers_are_shared: bool = True,
    first: int = 0,
) -> Any:
    """Return one structure from the replicas' structures, `values` being in replica order.

    A leaf becomes `wrap(devices, its components)`, unless it is the same object in all replicas.
    Where some replicas have None, the others' may be anything, and are components too. Copies of
    one variable, each on its replica's device, become the variable. Without `numbers_are_shared`
    the numbers of several replicas are wrapped also where they are the same. first: what the first
    replica is called in errors.
    Raises StructureError (a ValueError) where the structures differ, or the copies do not match.
    """
    if devices is not None and not isinstance(devices, DeviceMap):
        devices = replica_map(tuple(devices))
    try:
        return _regroup(tuple(values), wrap, devices, _NONE if numbers_are_shared else _NUMBERS)
    except _Different as different:
        where = "".join(f"[{name!r}]" for name in different.path)
        raise StructureError(
            f"replicas {first} and {first + different.replica} returned different structures, so "
            f"their values cannot be lined up{' at ' + where if where else ''}: {different.ours} "
            f"and {different.theirs}"
        ) from None


def line_up(values: Sequence[Any]) -> Any:
    """Regroup values, with a PerReplica for each leaf, also where it is the same in all replicas.

    Raises StructureError (a ValueError) where the structures differ.
    """

    def open_boxes(leaf: Any) -> PerReplica:
        return PerReplica(None, [box.leaf for box in local_results(leaf)])

    return map_leaves(open_boxes, regroup([map_leaves(_Box, value) for value in values]))


class _Box:
    """Holds one replica's leaf: an object that no other replica has."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def _words(value: Any) -> str:
    return describe(value.leaf if isinstance(value, _Box) else value)


class _Different(Exception):
    """Two replicas' structures differ, at a path that grows on the exception's way out."""

    def __init__(self, replica: int, ours: str, theirs: str) -> None:
        self.replica, self.ours, self.theirs = replica, ours, theirs
        self.path: list[Any] = []


def _regroup(
    row: tuple[Any, ...], wrap: Wrap, devices: DeviceMap | None, own: frozenset[type]
) -> Any:
    """Regroup the objects that stand at one place of the replicas' structures.

    Leaves of the types `own` are each replica's own, though they be the same object.
    """
    first = row[0]
    cls = type(first)
    same = True
    for other in row:
        if other is not first:
            same = False
            if type(other) is not cls:
                return _regroup_mixture(row, wrap, devices)
    how = _how(cls)
    if how is None:
        shared = same and (cls not in own or len(row) == 1)
        return first if shared else wrap(devices, row)
    if same and how is not _regroup_copies:
        # Left as it is; but what only one replica has may have copies inside.
        return first if len(row) > 1 else map_leaves(value_container, first)
    return how(row, wrap, devices, own)


def _find_how(cls: Any) -> How | None:
    """Return how objects of a class that are not the same one are regrouped; None: wrapped."""
    own = node(cls)
    if own is not None:
        parts = partial(_regroup_parts, own)
        return partial(_regroup_sequences, parts) if cls is list or cls is tuple else parts
    return _regroup_copies if hasattr(cls, "container") else None


_how: Callable[[type], How | None] = lru_cache(maxsize=1024)(_find_how)  # it is asked of every leaf


def _regroup_mixture(row: tuple[Any, ...], wrap: Wrap, devices: DeviceMap | None) -> Any:
    """Regroup objects of different types: leaves, or anything where some are None."""
    if any(value is None for value in row):
        return wrap(devices, row)
    for replica, value in enumerate(row):
        if type(value) is not type(row[0]) and (node(type(value)) or node(type(row[0]))):
            raise _Different(replica, _words(row[0]), _words(value))
    if any(value_container(value) is not value for value in row):
        raise StructureError(
            f"some replicas returned the copy of a variable and some other values: {list(row)}"
        )
    return wrap(devices, row)


def _regroup_parts(
    node: Node,
    row: tuple[Any, ...],
    wrap: Wrap,
    devices: DeviceMap | None,
    own: frozenset[type],
) -> Any:
    """Regroup objects of one class with parts, part by part."""
    names, parts, rest = node.open(row[0])
    columns = [parts]
    for replica, value in enumerate(row[1:], 1):
        theirs = node.open(value)
        column = theirs.parts
        if theirs.names != names:  # keys in another order, or other ones
            by_name = dict(zip(theirs.names, column, strict=True))
            if by_name.keys() != set(names):
                raise _Different(replica, _words(row[0]), _words(value))
            column = [by_name[name] for name in names]
        if theirs.rest != rest:
            raise _Different(replica, _words(row[0]), _words(value))
        columns.append(column)
    new: list[Any] = []
    try:
        for below in zip(*columns, strict=True):
            new.append(_regroup(below, wrap, devices, own))
    except _Different as different:
        different.path.insert(0, names[len(new)])
        raise
    return node.build(row[0], new)


def _regroup_sequences(
    parts: How,
    row: tuple[Any, ...],
    wrap: Wrap,
    devices: DeviceMap | None,
    own: frozenset[type],
) -> Any:
    """Regroup lists or tuples: the most usual of what has parts, in the quickest way."""
    first = row[0]
    for other in row:
        if len(other) != len(first):
            return parts(row, wrap, devices, own)  # which has the words for it
    new: list[Any] = []
    try:
        for below in zip(*row, strict=True):
            new.append(_regroup(below, wrap, devices, own))
    except _Different as different:
        different.path.insert(0, len(new))
        raise
    return new if type(first) is list else tuple(new)


def _regroup_copies(
    row: tuple[Any, ...], wrap: Wrap, devices: DeviceMap | None, own: frozenset[type]
) -> Any:
    """Return the variable whose copies these are; wrap them where they are no variable's (now)."""
    variable = value_container(row[0])
    if variable is row[0]:
        return row[0] if all(value is row[0] for value in row) else wrap(devices, row)
    copies = variable.copies
    for replica, value in enumerate(row):
        if value_container(value) is not variable:
            raise StructureError(
                f"replicas 0 and {replica} returned copies of different variables, {variable!r} "
                f"and {value_container(value)!r}, which are no one value"
            )
        matches = (
            value is copies[0]
            if len(copies) == 1
            else (value.device is devices[replica] if devices else value is copies[replica])
        )
        if not matches:
            raise StructureError(
                f"replica {replica} returned the copy on {value.device.short} of {variable!r}, "
                "which is another replica's; return variable.get(), or the variable itself"
            )
    return variable


def value_container(component: Any) -> Any:
    """Return the variable that this is a copy of; any other value as it is.

    A copy whose variable is gone is a value like any other.
    """
    if _how(type(component)) is not _regroup_copies:
        return component
    container = component.container
    held = any(copy is component for copy in getattr(container, "copies", ()))
    return container if held else component
