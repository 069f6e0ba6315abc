"""Rules: optimizers on a ps that do what those of the workers would.

A worker says of which class its optimizer is, and which numbers it has; their values come with
every push, since they may change from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from minidist import optim  # noqa: F401  (so that its rules are known)
from minidist.errors import UsageError
from minidist.optim.optimizer import Optimizer

TYPES = {"bool": bool, "int": int, "float": float}


def make(module: str, name: str) -> Optimizer:
    """Return an optimizer of a class that this process knows, whose numbers are not set.

    Raises UsageError where it does not know it.
    """
    for kind in _rules(Optimizer):
        if (kind.__module__, kind.__qualname__) == (module, name):
            rule: Optimizer = object.__new__(kind)
            Optimizer.__init__(rule, 0.0)
            return rule
    raise UsageError(
        f"no optimizer {module}.{name} is known here; define or import it in the ps too, before "
        "cluster.serve()"
    )


def set_numbers(rule: Optimizer, names: Sequence[tuple[str, str]], values: Sequence[float]) -> None:
    """Give an optimizer its numbers. names: each with its type; NaN stands for None."""
    for (name, kind), value in zip(names, values, strict=True):
        setattr(rule, name, None if math.isnan(value) else TYPES[kind](value))


def _rules(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _rules(each)
