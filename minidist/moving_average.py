"""Moving averages: variables that follow the mean of a value over all replicas.

    v = momentum·v + (1 − momentum)·Σ(c_i·x_i)/Σc_i

where c_i is the number of examples behind replica i's value x_i. A variable that starts from 0
stays too near to 0 for a while (its zero bias). With `updates`, a variable that counts the updates
so far, it is the average of the values alone instead: those k updates ago have the weight
momentum^k, divided by the sum of these weights. That is the formula above with

    momentum·(1 − momentum^(t−1))/(1 − momentum^t)      in update t = 1, 2, …

in the place of momentum, and needs no further state (Kingma and Ba 2015, section 3, solved for v).

With `staged_vars` an average follows one step late, through its delta area (see
variable_mgr/staged.py). One with `updates` is written at once: its first updates replace it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist import context
from minidist.assigning import fitting, follow
from minidist.comm.sharing import share
from minidist.errors import MergeMismatchError, UsageError
from minidist.structure import leaf
from minidist.sync_on_read import SyncOnReadVariable
from minidist.tensor import Tensor
from minidist.values import PerReplica, local_results
from minidist.variable import Variable

if TYPE_CHECKING:
    from minidist.comm.peers import Peers


def assign_moving_average(
    variable: Variable,
    value: Any,
    momentum: float,
    *,
    count: int = 1,
    updates: Variable | None = None,
) -> None:
    """Let one variable follow a value; see assign_moving_averages."""
    assign_moving_averages([variable], [value], momentum, count=count, updates=updates)


def assign_moving_averages(
    variables: Sequence[Variable],
    values: Sequence[Any],
    momentum: float,
    *,
    count: int | Sequence[int] = 1,
    updates: Variable | None = None,
) -> None:
    """Let each variable follow the mean of its value over all replicas, weighted by their counts.

    `count` is for all values, or one for each. In a replica all replicas meet, once for all
    variables; one for which none has an example does not change. In cross-replica context there is
    one value for all. `updates` is an integer variable, which is raised by one, and takes away the
    zero bias.
    Raises UsageError (a ValueError) for a PerReplica value in cross-replica context and for a
    momentum outside 0 … 1, and ContextError under a strategy that the variables do not belong to.
    """
    if not 0 <= momentum <= 1 or (momentum == 1 and updates is not None):
        raise UsageError(f"a moving average's momentum is from 0 to 1, not {momentum!r}")
    counts = list(count) if isinstance(count, Sequence) else [count] * len(variables)
    for each in counts:
        if each < 0 or each != int(each):
            raise UsageError(f"count is a number of examples and cannot be {each!r}")
    for variable in variables:
        variable.require_own_strategy("assigned")
        if isinstance(variable, SyncOnReadVariable):
            raise UsageError(
                f"the moving average {variable.name!r} is ON_READ: each replica assigns its own; "
                "create it without synchronization to let all replicas follow one mean"
            )
    brought = _Share(list(variables), list(values), counts, momentum, updates)
    frame = context.frame()
    if frame.replica is not None and frame.strategy is variables[0].strategy:
        frame.replica.merge_call(_average, brought)
        return
    for variable, value in zip(variables, values, strict=True):
        if isinstance(value, PerReplica):
            raise UsageError(
                f"the moving average {variable.name!r} cannot follow a PerReplica value in "
                "cross-replica context; reduce it first"
            )
    _follow(brought, [counts], [brought.values])


@leaf
@dataclass
class _Share:
    """What one replica brings."""

    variables: list[Variable]
    values: list[Any]
    counts: list[int]  # of the examples behind each value
    momentum: float
    updates: Variable | None


def _average(strategy: Any, shares: Any) -> None:
    """Let the variables follow what all replicas bring, also those of other workers."""
    given: Sequence[_Share] = local_results(shares)
    first = given[0]
    number = strategy.first_replica
    for replica, each in enumerate(given, number):
        same = each.variables == first.variables and each.updates is first.updates
        if not same or each.momentum != first.momentum:
            raise MergeMismatchError(
                f"replicas {number} and {replica} update the moving averages of different "
                "variables, or with a different momentum; all replicas must make the same calls in "
                "the same order"
            )
    counts = [each.counts for each in given]
    rows = [each.values for each in given]
    if strategy.site.peers.count > 1:
        counts, rows = _of_all(strategy.site.peers, first, given)
    _follow(first, counts, rows)


def _of_all(
    peers: Peers, first: _Share, given: Sequence[_Share]
) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the counts and the values of the replicas of all workers."""
    names = ", ".join(variable.name for variable in first.variables)
    arrays = [
        fitting(variable.copies[0], value).numpy()
        for each in given
        for variable, value in zip(first.variables, each.values, strict=True)
    ]
    counts = np.array([each.counts for each in given], np.int64).tobytes()
    what = f"update the moving averages {names} with a momentum of {first.momentum}"
    words, theirs = share(peers, what, arrays, brought=counts)
    flat = [array for each in theirs for array in each]
    width = len(first.variables)
    rows = [flat[start : start + width] for start in range(0, len(flat), width)]
    return np.frombuffer(b"".join(words), np.int64).reshape(-1, width).tolist(), rows


def _follow(first: _Share, counts: Sequence[Sequence[int]], rows: Sequence[Sequence[Any]]) -> None:
    """Let the variables take in the mean of each replica's row of values."""
    if not any(map(any, counts)):
        return
    momentum = first.momentum
    if first.updates is not None:
        t = int(first.updates.copies[0].tensor) + 1
        momentum *= (1 - momentum ** (t - 1)) / (1 - momentum**t)
        first.updates.assign(t)
    for variable, mean in _means(first.variables, counts, rows):
        if first.updates is None:
            variable.reader.follow(variable.copies, mean, momentum)
        else:
            follow(variable.copies, mean, momentum)


def _means(
    variables: Sequence[Variable], counts: Sequence[Sequence[int]], rows: Sequence[Sequence[Any]]
) -> Iterator[tuple[Variable, Tensor]]:
    """Yield each variable with its mean, where its first copy is: of many in one pass."""
    alike: dict[Any, list[int]] = {}
    for i, variable in enumerate(variables):
        weights = tuple(row[i] for row in counts)
        if any(weights):
            copy = variable.copies[0]
            alike.setdefault((copy.device, copy.dtype, weights), []).append(i)
    means: dict[int, Tensor] = {}
    for (device, dtype, weights), places in alike.items():
        copies = [variables[i].copies[0] for i in places]
        arrays = [device.allocate(copy.shape, dtype) for copy in copies]
        having = [replica for replica, weight in enumerate(weights) if weight]
        device.ops.sum(
            [arrays],
            [
                [
                    fitting(copy, rows[replica][i]).array
                    for copy, i in zip(copies, places, strict=True)
                ]
                for replica in having
            ],
            weights=[float(weights[replica]) for replica in having],
            scale=1 / sum(weights),
        )
        means |= {i: Tensor(array, device) for i, array in zip(places, arrays, strict=True)}
    return ((variables[i], means[i]) for i in sorted(means))
