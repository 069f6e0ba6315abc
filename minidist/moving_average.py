"""Moving averages: variables that follow the mean of a value over all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist import context
from minidist.errors import ContextError
from minidist.tensor import Tensor, to_device
from minidist.values import local_results
from minidist.variable import Variable


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
        raise ContextError(
            "moving averages are updated in a replica; call the layer inside strategy.run"
        )
    replica.merge_call(_average, tuple(variables), tuple(values), momentum, _Count(count))


class _Count:
    """A number of examples that is each replica's own, also where they are equal."""

    def __init__(self, value: int) -> None:
        self.value = value


def _average(
    strategy: Any,
    variables: tuple[Variable, ...],
    values: tuple[Any, ...],
    momentum: float,
    counts: Any,
) -> None:
    weights = [count.value for count in local_results(counts)]
    total = sum(weights)
    if total == 0:
        return
    momentum = local_results(momentum)[0]
    for variable, value in zip(variables, values, strict=True):
        parts = [
            to_device(part, variable.copies[0].device) * weight
            for weight, part in zip(weights, local_results(value), strict=True)
            if weight
        ]
        mean = sum(parts[1:], parts[0]) * (1 / total)
        new = variable.copies[0].tensor * momentum + mean * (1 - momentum)
        for copy in variable.copies:
            copy.write(new)
