"""Who is running: which strategy, replica and device. One frame per thread, replaced as a whole.

A thread is in exactly one of two contexts. In *replica context* it computes as one replica
(`get_replica_context()` answers). In *cross-replica context* it acts for all of them
(`get_cross_replica_context()` answers): inside `strategy.scope()`, in a merge function, in an
update. With no strategy at all, the default strategy's only replica is the context.

A frame is never changed; entering a context puts another one in its place and leaving puts the old
one back. A replica's thread starts with a frame derived from its caller's, so it inherits what the
frame holds, and nothing outlives the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from minidist.device import Device, get
from minidist.errors import ContextError


class ReplicaContext(Protocol):
    """What a replica knows and can do (minidist.replica has the ones that run on threads)."""

    @property
    def replica_id(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def strategy(self) -> Any: ...
    def merge_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


class Frame:
    """The context of one thread at one moment."""

    __slots__ = (
        "creators",
        "device",
        "draws",
        "name_scope",
        "replica",
        "replica_id",
        "run",
        "step",
        "strategy",
        "update_device",
    )

    def __init__(
        self,
        *,
        strategy: Any,
        replica: ReplicaContext | None,
        device: Device,
        replica_id: int,
        run: Any,
        update_device: Device | None,
        name_scope: str,
        creators: tuple[Any, ...],
        step: int,
        draws: dict[int, int],
    ) -> None:
        self.strategy = strategy  # the strategy, in both contexts
        self.replica = replica  # None in cross-replica context
        self.device = device  # where operations run and new tensors live
        self.replica_id = replica_id  # whose random numbers are drawn
        self.run = run  # the run that this thread works for, also in its merges
        self.update_device = update_device  # the copy's device inside strategy.update
        self.name_scope = name_scope  # "" or "outer/inner/"
        self.creators = creators  # variable creators, innermost last
        self.step = step  # which random numbers are drawn
        self.draws = draws  # how many each layer has drawn in this step

    def but(self, **changes: Any) -> Frame:
        """Return a copy with some fields changed."""
        frame = Frame.__new__(Frame)
        for name in Frame.__slots__:
            setattr(frame, name, changes[name] if name in changes else getattr(self, name))
        return frame


class _Thread(threading.local):
    frame: Frame | None = None


_thread = _Thread()
_default: Frame | None = None
_seed = 0


def set_default(strategy: Any, replica: ReplicaContext, device: Device) -> None:
    """Install the strategy and replica that are there when no other is (minidist.strategy does)."""
    global _default
    _default = Frame(
        strategy=strategy,
        replica=replica,
        device=device,
        replica_id=0,
        run=None,
        update_device=None,
        name_scope="",
        creators=(),
        step=0,
        draws={},
    )


def frame() -> Frame:
    """Return this thread's frame."""
    current = _thread.frame
    if current is None:
        if _default is None:
            raise ContextError("minidist has no default strategy yet; import minidist as a whole")
        # Each thread draws its own random numbers, so the counts are its own too.
        current = _thread.frame = _default.but(draws={})
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

    A class and not a generator: a generator that is dropped while open would be closed by the
    garbage collector, and put an old frame back at a moment nobody chose.
    """

    __slots__ = ("_changes", "_new", "_old")

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> Frame:
        self._old = frame()
        self._new = _thread.frame = self._old.but(**self._changes)
        return self._new

    def __exit__(self, *exception: object) -> None:
        opened, _thread.frame = _thread.frame, self._old
        if opened is not self._new and exception[0] is None:
            raise ContextError(
                "nesting error: a scope is left while one opened inside it is still open "
                f"(now in {describe(opened)}); leave scopes in the reverse order of entering them"
            )


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
    """Return this thread's replica context, or None in cross-replica context."""
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
    """Put `name/` before the names of variables that are created in the with statement."""
    return entered(name_scope=f"{frame().name_scope}{name}/")


def variable_creator_scope(creator: Callable[..., Any]) -> entered:
    """Let `creator(next_creator, **kwargs)` make the variables created in the with statement.

    The innermost creator is asked first; each may change the keyword arguments, and calls
    `next_creator(**kwargs)` to go on.
    """
    return entered(creators=(*frame().creators, creator))


# --- random numbers -----------------------------------------------------------------------------


def seed(value: int) -> None:
    """Set the seed of all random numbers; this thread starts to draw anew."""
    global _seed
    _seed = int(value) % 2**64
    frame().draws.clear()


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
