"""Training: what a checkpoint is of. One strategy's variables, and one optimizer's counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist import context
from minidist.checkpoint.about import About
from minidist.dtypes import HostArray
from minidist.errors import ContextError, UsageError
from minidist.optim import Optimizer
from minidist.state import Part, by_key, copies_of, held_of, slots_of
from minidist.variable import Variable


@dataclass(frozen=True)
class State:
    """What there is to save, of all workers: without its values, but for those that are held.

    held: copies of the arrays that the policy holds from step to step, which all workers have.
    """

    named: Mapping[str, Sequence[Part]]
    held: Mapping[str, HostArray]
    about: About

    @classmethod
    def of(cls, strategy: Any, variables: Sequence[Variable], optimizer: Optimizer | None) -> State:
        """Raises UsageError for what cannot be saved."""
        check_optimizer(optimizer)
        if optimizer is not None:
            optimizer.require_whole_step("saved")
        slots = slots_of(variables, optimizer)
        everything = (*variables, *slots)
        copies = copies_of(everything)
        kept = held_of(everything)
        about = About.of(strategy, optimizer, copies)
        about.held = {key: each.factor for key, each in kept.items()}
        if optimizer is not None:
            about.slots = [slot.name for slot in slots]
            about.iterations = counts_of(strategy, optimizer)
        held = {key: each.array for key, each in kept.items() if each.array is not None}
        return cls(by_key(everything, copies), held, about)


def check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for what is no optimizer."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"a checkpoint keeps the state of one optimizer, or of none, and not of {optimizer!r}; "
            "use a file for each, with the variables that each trains"
        )


def strategy_of(variables: Collection[Variable], verb: str) -> Any:
    """Return the one strategy of the variables, whose cross-replica context this must be."""
    strategies = list(dict.fromkeys(variable.strategy for variable in variables))
    others = [strategy for strategy in strategies if not context.is_default(strategy)]
    if len(others) > 1:
        raise ContextError(
            f"Mixing different Strategy objects: {verb} got variables of "
            f"{' and '.join(map(repr, others))}; use a file for each"
        )
    for strategy in strategies:
        strategy._require(verb)
    return (others or strategies)[0]


def counts_of(strategy: Any, optimizer: Optimizer) -> list[int]:
    """Return how many steps each model has made that is trained here: under `independent` several.

    In all others it is one, the same in all workers.
    """
    places = range(len(strategy.devices)) if strategy.variable_mgr.independent else [0]
    return [optimizer.iterations_at(place) for place in places]


def restore_counts(strategy: Any, optimizer: Optimizer, counts: Sequence[int]) -> None:
    """Let an optimizer count on from what `counts_of` has returned in all workers, one by one.

    A model that was not there counts as the first one.
    """
    places = len(strategy.devices)
    first = strategy.first_replica if strategy.variable_mgr.independent else len(counts)
    here = list(counts[first : first + places])
    optimizer.restore_iterations(here + [counts[0]] * (places - len(here)))
