"""Nested structures: which objects have parts, and how one is put together again from new parts.

| object | its parts | the new one |
|---|---|---|
| list, tuple | the elements | a list, a tuple |
| named tuple | the fields | of the same class, without running its `__new__` |
| dict and any other Mapping | the values | of the same class, with the keys in the same order |
| dataclass | the fields | of the same class, without running its `__init__` |
| what is registered as a pytree with optree | what its function says | what its function makes |

All else is a leaf: also sets, strings, arrays, and subclasses of list and tuple that are not named
tuples, unless they are registered (in optree's global namespace, or in "minidist"). `leaf` makes
leaves of the instances of a dataclass or Mapping. Register a class, or make it a leaf, before its
first instance comes here: what has been found out about a class is remembered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import optree

C = TypeVar("C", bound=type)

_leaves: WeakSet[type] = WeakSet()


def leaf(cls: C) -> C:
    """Decorate a dataclass or Mapping whose instances are passed around whole, as one value."""
    _leaves.add(cls)
    return cls


class Opened(NamedTuple):
    """An object's parts, their names, and whatever else must agree for two to be alike."""

    names: Sequence[Any]
    parts: Sequence[Any]
    rest: Any = None


class Node(NamedTuple):
    """How the instances of one class are taken apart and put together."""

    open: Callable[[Any], Opened]
    build: Callable[[Any, Sequence[Any]], Any]  # (one like it, new parts in the order of its own)


def _node(cls: Any) -> Node | None:
    """Return how instances of a class are walked into; None where they are leaves."""
    if cls is list or cls is tuple:
        return Node(lambda x: Opened(range(len(x)), x), lambda _, parts: cls(parts))
    if any(base in _leaves for base in cls.__mro__):
        return None
    registered = optree.register_pytree_node.get(cls, namespace="minidist")
    if registered is not None and registered.kind in _REGISTERED:
        return _registered(registered.unflatten_func)
    if issubclass(cls, Mapping):
        return Node(_open_mapping, _build_mapping)
    if optree.is_namedtuple_class(cls):
        names = cls._fields
        return Node(lambda x: Opened(names, x), lambda _, parts: tuple.__new__(cls, parts))
    if is_dataclass(cls) and (
        cls.__new__ is object.__new__ or isinstance(cls.__new__, FunctionType)
    ):  # one that is an exception, say, is made by a `__new__` in C and stays whole
        return _dataclass(cls)
    return None


# `_node`, remembered; not for ever, as a function may make a new class in every step.
node: Callable[[type], Node | None] = lru_cache(maxsize=1024)(_node)

_REGISTERED = (optree.PyTreeKind.CUSTOM, optree.PyTreeKind.DEQUE)


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Return the structure with each leaf replaced by `fn(leaf)`; itself where nothing changes."""
    own = node(type(structure))
    if own is None:
        return fn(structure)
    parts = own.open(structure).parts
    new = [fn(part) if node(type(part)) is None else map_leaves(fn, part) for part in parts]
    for part, other in zip(parts, new, strict=True):
        if part is not other:
            return own.build(structure, new)
    return structure


def leaves(structure: Any) -> list[Any]:
    """Return the leaves in order."""
    own = node(type(structure))
    if own is None:
        return [structure]
    return [found for part in own.open(structure).parts for found in leaves(part)]


def fill(structure: Any, values: Iterable[Any]) -> Any:
    """Return the structure with these leaves, one for each in the order of `leaves`."""
    rest = iter(values)
    return map_leaves(lambda _: next(rest), structure)


def describe(structure: Any) -> str:
    """Say what kind of object it is and which parts it has, for an error message."""
    name = type(structure).__name__
    own = node(type(structure))
    if own is None:
        return f"a leaf of type {name}"
    names, _, rest = own.open(structure)
    if isinstance(names, range):
        return f"{name} of length {len(names)}"
    also = "" if rest is None else f" and {rest!r}"
    return f"{name} with {', '.join(map(repr, names)) or 'nothing in it'}{also}"


def _registered(build: Callable[[Any, Any], Any]) -> Node:
    def open(x: Any) -> Opened:
        children, rest, names, _ = optree.tree_flatten_one_level(
            x, none_is_leaf=True, namespace="minidist"
        )
        return Opened(names, children, rest)

    return Node(open, lambda like, parts: build(open(like).rest, parts))


def _open_mapping(x: Any) -> Opened:
    names = tuple(x)
    return Opened(names, [x[name] for name in names])


def _build_mapping(like: Any, parts: Sequence[Any]) -> Any:
    new = dict(zip(like, parts, strict=True))
    if type(like) is dict:
        return new
    if not isinstance(like, MutableMapping):
        return type(like)(new)
    changed: Any = copy.copy(like)  # with what else it has: a default factory, attributes
    for name, part in new.items():
        changed[name] = part
    return changed


def _dataclass(cls: Any) -> Node:
    declared = tuple(field.name for field in fields(cls))

    def open(x: Any) -> Opened:
        names = tuple([name for name in declared if hasattr(x, name)])
        return Opened(names, [getattr(x, name) for name in names])

    def build(like: Any, parts: Sequence[Any]) -> Any:
        new: Any = object.__new__(cls)
        if hasattr(like, "__dict__"):  # attributes that are no fields
            new.__dict__.update(like.__dict__)
        for name, part in zip(open(like).names, parts, strict=True):
            object.__setattr__(new, name, part)  # also into a frozen one
        return new

    return Node(open, build)
