"""Serving: what a parameter server does of a save and of a load, when the first worker asks it.

save      write a shard of what it holds, with the slots beside it
read      read what it holds from a checkpoint, and look whether it fits
take      put what was read there in place of what it holds
forget    forget it instead
settle    nothing: who asks has sent what it sends before

Each is given a `Shelf` and a dict, and returns a dict; both are what JSON can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from minidist.checkpoint import about, shards
from minidist.checkpoint.opened import is_there, opened
from minidist.dtypes import HostArray
from minidist.errors import DataError
from minidist.optim import Optimizer
from minidist.state import slots_of
from minidist.variable import Variable


class Shelf(Protocol):
    """What a parameter server holds."""

    name: str
    task: int
    variables: list[Variable]
    optimizer: Optimizer | None

    def changed(self) -> None:
        """Note that variables have got values by another way than an update."""


class _Read:
    """What one has read and not taken yet."""

    def __init__(self, arrays: dict[Variable, HostArray], iterations: Sequence[int]) -> None:
        self.arrays = arrays
        self.iterations = iterations


_read: WeakKeyDictionary[Shelf, _Read] = WeakKeyDictionary()


def settle(shelf: Shelf, asked: dict[str, Any]) -> dict[str, Any]:
    return {}


def save(shelf: Shelf, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the index must know of the shard, and what else the checkpoint says."""
    variables = _of(shelf, asked)
    slots = slots_of(variables, shelf.optimizer)
    arrays = {variable.name: variable.to_save() for variable in (*variables, *slots)}
    if not arrays:
        return {}
    number = asked["first"] + shelf.task
    base = Path(asked["base"])
    shard = shards.write_shard(base, asked["save"], number, asked["count"], arrays, asked["mode"])
    iterations = 0 if shelf.optimizer is None else shelf.optimizer.iterations
    slot_names = [slot.name for slot in slots]
    return {**shard, "by": shelf.name, "slots": slot_names, "iterations": iterations}


def read(shelf: Shelf, asked: dict[str, Any]) -> dict[str, Any]:
    """Read what is to be taken; the first worker has found out that it fits."""
    base = Path(asked["base"])
    if not is_there(base):
        raise DataError(f"{base}: {shelf.name} sees no checkpoint there; {shards.SHARED}")
    with opened(base, everything=False) as file:
        if file.checksum != asked["checksum"]:
            raise DataError(f"{base}: {shelf.name} sees another checkpoint there; {shards.SHARED}")
        variables = _of(shelf, asked)
        if asked["optimizer"]:
            variables += slots_of(variables, shelf.optimizer, file.entries)
        found = {each.name: each for each in variables if each.name in file.entries}
        dtypes = {name: variable.dtype for name, variable in found.items()}
        arrays = file.read(dtypes)
        counts = about.read(file).iterations if asked["optimizer"] else []
    _read[shelf] = _Read({found[name]: array for name, array in arrays.items()}, counts)
    return {}


def take(shelf: Shelf, asked: dict[str, Any]) -> dict[str, Any]:
    got = _read.pop(shelf)
    for variable, array in got.arrays.items():
        variable.restore(array)
    if shelf.optimizer is not None and got.iterations:
        shelf.optimizer.restore_iterations(got.iterations[:1])
    shelf.changed()
    return {}


def forget(shelf: Shelf, asked: dict[str, Any]) -> dict[str, Any]:
    _read.pop(shelf, None)
    return {}


def _of(shelf: Shelf, asked: dict[str, Any]) -> tuple[Variable, ...]:
    """Return those of its variables that are asked for."""
    wanted = set(asked["names"])
    return tuple(variable for variable in shelf.variables if variable.name in wanted)


VERBS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "settle": settle,
    "save": save,
    "read": read,
    "take": take,
    "forget": forget,
}
