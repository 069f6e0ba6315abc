"""increment_var: count once for all replicas."""

from __future__ import annotations

from typing import Any

from minidist import context
from minidist.comm.sharing import agree
from minidist.errors import ContextError
from minidist.values import PerReplica
from minidist.variable import Variable


def increment_var(variable: Variable, amount: Any = 1) -> None:
    """Add `amount` to a variable once, however many replicas there are; all of them must call it.

    The variable needs no aggregation. Raises ContextError in cross-replica context, TypeError
    where the amounts of the replicas differ.
    """
    replica = context.get_replica_context()
    if replica is None:
        raise ContextError(
            f"increment_var was called in {context.describe()}; use assign_add there, or call it "
            "inside strategy.run"
        )
    replica.merge_call(_increment, variable, amount)


def _increment(strategy: Any, variable: Variable, amount: Any) -> None:
    if isinstance(amount, PerReplica):
        raise TypeError(
            f"increment_var: the replicas add different amounts to {variable.name!r}: {amount!r}; "
            "pass the same, or use assign_add with an aggregation"
        )
    agree(strategy.site.peers, "increment a variable", [f"{variable.name!r} by {amount!r}"])
    strategy.update(variable, Variable.assign_add, amount)
