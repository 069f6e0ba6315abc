"""Moving averages of a model's layers: they follow all together, at the end of a forward pass.

Replicas meet to let a moving average follow their mean. A model has one for each layer, and none
of them is read before the pass is over, so one meeting does for all that have a momentum in common.
How many examples a layer counts may differ between replicas, so meetings do not depend on that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from minidist.moving_average import assign_moving_averages
from minidist.tensor import Tensor
from minidist.variable import Variable

Pairs = list[tuple[Variable, Tensor]]


class _Waiting(threading.local):
    """What is to follow what, and its count, by momentum, in the pass that this thread is in."""

    pairs: dict[float, list[tuple[Variable, Tensor, int]]] | None = None


_waiting = _Waiting()


@contextmanager
def together() -> Iterator[None]:
    """Let what `follow` is told within follow at the end, or at that of a `together` around it."""
    if _waiting.pairs is not None:
        yield
        return
    _waiting.pairs = {}
    try:
        yield
        pairs = _waiting.pairs
    finally:
        _waiting.pairs = None
    for momentum, some in pairs.items():
        variables, values, counts = zip(*some, strict=True)
        assign_moving_averages(variables, values, momentum, count=counts)


def follow(pairs: Pairs, momentum: float, count: int) -> None:
    """Let each variable follow a value; see assign_moving_averages."""
    with together():
        assert _waiting.pairs is not None
        _waiting.pairs.setdefault(momentum, []).extend((*pair, count) for pair in pairs)
