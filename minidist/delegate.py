"""Delegate: operators and attributes that are those of the object which the context is about."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Operator = Callable[[Any, Any], Any]


def current(value: Any) -> Any:
    """Return what a Delegate stands for in the current context; any other value as it is."""
    return value.get() if isinstance(value, Delegate) else value


def _forward(operation: Operator) -> Operator:
    def forward(self: Delegate, other: Any) -> Any:
        return operation(self.get(), current(other))

    return forward


def _both(operation: Operator) -> tuple[Operator, Operator]:
    def reflected(self: Delegate, other: Any) -> Any:
        return operation(current(other), self.get())

    return _forward(operation), reflected


class Delegate:
    """Does with `get()`'s answer what is done with it.

    Missing on purpose: `==` and `hash`, which go by identity, so that a distributed value can be a
    key and be looked for in a list; assignment to attributes and elements; and attributes whose
    names start with an underscore.
    """

    __slots__ = ()

    __array_ufunc__ = None  # array + value is the value's business, not an element-wise loop

    def get(self) -> Any:
        """Return what is meant; the class that delegates says which."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            component = self.get()
        except ValueError as none:  # an AttributeError, or hasattr would not just say no
            raise AttributeError(f"attribute {name!r}: {none}") from none
        return getattr(component, name)

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __matmul__, __rmatmul__ = _both(operator.matmul)
    __and__, __rand__ = _both(operator.and_)
    __or__, __ror__ = _both(operator.or_)
    __xor__, __rxor__ = _both(operator.xor)
    __lshift__, __rlshift__ = _both(operator.lshift)
    __rshift__, __rrshift__ = _both(operator.rshift)
    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __getitem__ = _forward(operator.getitem)

    def __pow__(self, exponent: Any, modulo: Any = None) -> Any:
        if modulo is None:
            return operator.pow(self.get(), current(exponent))
        return pow(self.get(), current(exponent), current(modulo))

    def __rpow__(self, base: Any) -> Any:
        return operator.pow(current(base), self.get())

    def __neg__(self) -> Any:
        return -self.get()

    def __pos__(self) -> Any:
        return +self.get()

    def __invert__(self) -> Any:
        return ~self.get()

    def __abs__(self) -> Any:
        return abs(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __index__(self) -> int:
        return operator.index(self.get())

    def __len__(self) -> int:
        return len(self.get())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.get(), dtype=dtype, copy=copy)
