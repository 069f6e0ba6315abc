"""The default strategy, which is there when no other is: one replica, on the calling thread.

Every call of a strategy works for it, and nothing meets. In its replica context are all threads
that have not entered another strategy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidist import context
from minidist.device import Device
from minidist.errors import ContextError
from minidist.reduction import ReduceOp
from minidist.replica import not_active, own_value
from minidist.strategy import Strategy
from minidist.structure import map_leaves
from minidist.variable import Variable


class DefaultReplica:
    """The replica that there is when there is no strategy: the current thread."""

    replica_id = local_id = 0
    num_replicas = 1

    def __init__(self, strategy: DefaultStrategy) -> None:
        self.strategy = strategy

    @property
    def device(self) -> Device:
        return context.device()

    def merge_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(strategy, *args, **kwargs)` at once: there is nobody to wait for."""
        frame = context.frame()
        if frame.replica is not self:
            raise not_active(self, frame)
        with context.entered(replica=None):
            return fn(self.strategy, *args, **kwargs)

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """Return the sum or mean of a single replica's value."""
        return self.strategy.reduce(op, map_leaves(own_value, value))

    def __repr__(self) -> str:
        return "<the default replica>"


class CurrentDevice:
    """Answers where a variable of no strategy lives: where it is created."""

    kind = Variable

    def devices(self, nbytes: int, beside: Device | None = None) -> Sequence[Device]:
        return (beside or context.device(),)


class DefaultStrategy(Strategy):
    """One replica on the calling thread."""

    def __init__(self) -> None:
        super().__init__("cpu", "independent")
        self.variable_mgr.place = CurrentDevice()
        self.replica = DefaultReplica(self)

    def scope(self) -> context.entered:
        """Return a with statement's way to where there is no strategy, which is nowhere.

        In it only this strategy may create variables: under another one's scope it is an error.
        """
        self._require("scope")
        return context.entered(lambda old: {"creators": (*old.creators, _by_default)})

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(*args, **kwargs)` as the default replica."""
        self._require("run")
        with context.entered(replica=self.replica, update_device=None):
            return fn(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        return self  # there is only one

    def __repr__(self) -> str:
        return "<the default Strategy>"


def _by_default(next_creator: Callable[..., Any], **options: Any) -> Any:
    if context.has_strategy():
        raise ContextError(
            f"Mixing different Strategy objects: variable {options.get('name')!r} is created in "
            f"{context.describe()}, inside the scope of the default strategy; leave one of them"
        )
    return next_creator(**options)


def install() -> None:
    """Make it the strategy of every thread that has entered no other."""
    strategy = DefaultStrategy()
    context.set_default(strategy, strategy.replica, strategy.devices[0])
