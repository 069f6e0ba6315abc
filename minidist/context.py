"""Who is running: which strategy, replica and device. One frame per thread, replaced as a whole.

A thread is in exactly one of two contexts. In *replica context* it computes as one replica
(`get_replica_context()` answers). In *cross-replica context* it acts for all of them
(`get_cross_replica_context()` answers): inside `strategy.scope()`, in a merge function, in an
update. With no strategy at all, the default strategy's only replica is the context.

A frame is never changed; entering a context puts another one in its place and leaving puts the old
one back. A replica's thread starts with a frame derived from its caller's, so it inherits what the
frame holds, and nothing outlives the run. A merge function has one derived from replica 0's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from minidist.device import Device, get
from minidist.dtypes import as_dtype, kind
from minidist.errors import ContextError, UsageError


class ReplicaContext(Protocol):
    """What a replica knows and can do (minidist.replica has the ones that run on threads)."""

    @property
    def replica_id(self) -> int: ...  # among the replicas of all machines
    @property
    def local_id(self) -> int: ...  # among those of this process
    @property
    def num_replicas(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def strategy(self) -> Any: ...
    def merge_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


class Frame(NamedTuple):
    """The context of one thread at one moment."""

    strategy: Any  # the strategy, in both contexts
    replica: ReplicaContext | None  # None in cross-replica context
    device: Device  # where operations run and new tensors live
    draws: dict[int, int]  # how many random numbers each layer has drawn in this step
    replica_id: int = 0  # whose random numbers are drawn
    step: int = 0  # which random numbers are drawn
    run: Any = None  # the run that this thread works for, also in its merges
    update_device: Device | None = None  # the copy's device inside strategy.update
    name_scope: str = ""  # "" or "outer/inner/"
    creators: tuple[Any, ...] = ()  # variable creators, innermost last
    dtype: np.dtype[Any] = np.dtype(np.float32)  # what Python's floats become
    activations: Any = None  # the dtype of what layers make of integers; None: of their variables
    newest: bool = False  # replicas read variables as they are, where a policy gives older values
    scope: entered | None = None  # the scope that was entered to get here, in this thread
    outer: Frame | None = None  # the frame it will put back

    def but(self, **changes: Any) -> Frame:
        """Return a copy with some fields changed."""
        return self._replace(**changes)


class _Thread(threading.local):
    frame: Frame | None = None
    base: Frame | None = None  # the frame outside of all scopes


_thread = _Thread()
_default: Frame | None = None
_seed = 0


def set_default(strategy: Any, replica: ReplicaContext, device: Device) -> None:
    """Install what is there when no other strategy is (minidist.default_strategy does)."""
    global _default
    _default = Frame(strategy, replica, device, {})


def frame() -> Frame:
    """Return this thread's frame."""
    current = _thread.frame
    if current is None:
        if _default is None:
            raise ContextError("minidist has no default strategy yet; import minidist as a whole")
        # Each thread draws its own random numbers, so the counts are its own too.
        current = _thread.frame = _thread.base = _default.but(draws={})
    return current


def enter(new: Frame) -> Frame:
    """Make `new` this thread's frame and return the one it replaces, to be given to `leave`."""
    old = frame()
    _thread.frame = new
    return old


def leave(old: Frame) -> None:
    """Put back the frame that `enter` returned."""
    _thread.frame = old


class entered:
    """Change fields of this thread's frame for the length of a with statement.

    `change` says what to change in the frame that is there on entering, the keyword arguments what
    to change in any. An object of this class holds nothing but that: it can be entered again
    inside itself, and by several threads at once.

    Leaving while a scope opened inside is still open is a ContextError and leaves nothing: leave
    the inner one, then this one. When an exception passes through, all of them are left.

    A class and not a generator: a generator that is dropped while open would be closed by the
    garbage collector, and put an old frame back at a moment nobody chose.
    """

    __slots__ = ("_change", "_changes")

    def __init__(
        self, change: Callable[[Frame], dict[str, Any]] | None = None, **changes: Any
    ) -> None:
        self._change = change
        self._changes = changes

    def __enter__(self) -> Frame:
        old = frame()
        changes = self._changes if self._change is None else self._change(old)
        new = _thread.frame = old.but(scope=self, outer=old, **changes)
        return new

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        current = frame()
        mine: Frame | None = current
        while mine is not None and mine.scope is not self:
            mine = mine.outer
        if kind is None and mine is not current:
            raise ContextError(
                "nesting error: a scope is left that is not open in this thread"
                if mine is None
                else "nesting error: a scope is left while one opened inside it is still open "
                f"(now in {describe(current)}); leave scopes in the reverse order of entering them"
            )
        if mine is not None:
            _thread.frame = mine.outer


def set_strategy(strategy: Any) -> None:
    """Make a strategy this thread's own from now on: its scope without an end. None undoes it.

    A strategy set before is left first. Other threads do not notice, except those of replicas
    that are run from here.
    Raises ContextError inside a with statement's scope and inside a run, UsageError (a ValueError)
    for what is no strategy.
    """
    current = frame()
    if current is not _thread.base:
        raise ContextError(
            "set_strategy must not be called inside a scope or a run, and this is inside one (in "
            f"{describe(current)}); leave it first, or enter strategy.scope() instead"
        )
    if strategy is not None and not hasattr(strategy, "scope"):
        raise UsageError(f"set_strategy takes a Strategy, or None, not {strategy!r}")
    assert _default is not None
    _thread.frame = _thread.base = _default.but(draws=current.draws)
    if strategy is not None and not is_default(strategy):
        _thread.base = strategy.scope().__enter__()


def describe(of: Frame | None = None) -> str:
    """Say in a few words which context a frame is."""
    of = of or frame()
    if _default is not None and of.strategy is _default.strategy:
        return "the default context (no strategy)"
    if of.replica is not None:
        return f"replica {of.replica.replica_id} of {of.strategy!r}"
    if of.update_device is not None:
        return f"an update on {of.update_device.short} under {of.strategy!r}"
    return f"the cross-replica context of {of.strategy!r}"


# --- what users ask -----------------------------------------------------------------------------


def get_replica_context() -> ReplicaContext | None:
    """Return this thread's replica context, or None in cross-replica context.

    Where there is no strategy it is that of the default strategy's only replica.
    """
    return frame().replica


def get_cross_replica_context() -> Any:
    """Return the strategy in cross-replica context, or None in a replica context."""
    current = frame()
    return None if current.replica is not None else current.strategy


def in_cross_replica_context() -> bool:
    """Whether this thread acts for all replicas at once."""
    return frame().replica is None


def get_strategy() -> Any:
    """Return the strategy of either context; the default strategy where there is none."""
    return frame().strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    return _default is None or frame().strategy is not _default.strategy


def is_default(strategy: Any) -> bool:
    """Whether this is the strategy that there is when no other is."""
    return _default is not None and strategy is _default.strategy


def get_update_device() -> Device | None:
    """Return the device whose copy is being updated, or None outside `strategy.update`."""
    return frame().update_device


def device() -> Device:
    """Return the device current in this thread: where operations run."""
    return frame().device


def device_scope(name: str | Device) -> entered:
    """Make a device current for the length of a with statement (`md.device`)."""
    return entered(device=get(name))


def name_scope(name: str) -> entered:
    """Put `name/` before the names of variables that are created in the with statement.

    Replicas i > 0 have `replica_i/` between the scopes around `run` and those opened inside.
    Raises UsageError (a ValueError) for an empty name.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a name scope's name is a string that is not empty, not {name!r}")
    return entered(lambda old: {"name_scope": f"{old.name_scope}{name}/"})


def variable_creator_scope(creator: Callable[..., Any]) -> entered:
    """Let `creator(next_creator, **kwargs)` make the variables created in the with statement.

    The innermost creator is asked first; each may change the keyword arguments, and calls
    `next_creator(**kwargs)` to go on.
    """
    return entered(lambda old: {"creators": (*old.creators, creator)})


def default_dtype(dtype: Any) -> entered:
    """Let Python's floats become `dtype` in the with statement: as constants and variables.

    Without it they become float32. Raises UsageError (a ValueError) for no floating-point dtype.
    """
    chosen = as_dtype(dtype)
    if kind(chosen) != "f":
        raise UsageError(f"the default dtype is that of floats; it cannot be {chosen}")
    return entered(dtype=chosen)


# --- random numbers -----------------------------------------------------------------------------


def seed(value: int) -> None:
    """Set the seed of all random numbers, from 0 to 2⁶⁴−1; this thread starts to draw anew."""
    global _seed
    if not isinstance(value, int | np.integer) or not 0 <= value < 2**64:
        raise UsageError(f"a seed is an integer from 0 to 2**64 - 1, not {value!r}")
    _seed = int(value)
    frame().draws.clear()


def random_state() -> tuple[int, dict[int, int]]:
    """Return the seed, and how many random draws each layer has made in this thread's step."""
    return _seed, dict(frame().draws)


def set_random_state(value: int, draws: dict[int, int]) -> None:
    """Let this thread draw on from what `random_state` returned."""
    seed(value)
    frame().draws.update(draws)


def draw(layer: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the Philox key and counter words of this layer's next draw.

    The key is the seed. The counter words 1 to 3 are the number of the draw since the step began,
    the step, and `replica << 16 | layer`; word 0 counts blocks within the draw. So the numbers
    depend on seed, step, replica and layer, and on nothing else.
    """
    current = frame()
    number = current.draws.get(layer, 0)
    current.draws[layer] = number + 1
    words = (
        number % 2**32,
        current.step % 2**32,
        (current.replica_id << 16 | layer & 0xFFFF) % 2**32,
    )
    return (_seed & 0xFFFFFFFF, _seed >> 32), words
