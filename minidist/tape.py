"""GradientTape: write down each operation as it runs, then walk back and sum the derivatives.

An operation calls `record` with its result, its inputs and a closure that turns the gradient of
the result into gradients of the inputs. `GradientTape.gradient` walks those entries from the last
to the first. Tapes are kept per thread, so each replica records only its own work.

A gradient is an array, or an IndexedSlices where an operation uses only some rows of an input.
Sums of those keep all rows; a sum with an array, and whatever goes on backwards, is an array.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import optree

from minidist import observe
from minidist.device.base import Array
from minidist.dtypes import kind
from minidist.errors import ContextError, ShapeError
from minidist.indexed_slices import IndexedSlices, concatenate
from minidist.tensor import Tensor

Gradient = Array | IndexedSlices


class InBucket(NamedTuple):
    """A gradient is wanted, best in this array of a bucket: that spares a copy."""

    array: Array


Need = bool | InBucket
Backward = Callable[[Array, Sequence[Need]], Sequence[Gradient | None]]
Sink = Callable[[Any, Gradient], object]
Into = Callable[[Any], Array | None]
Readings = dict[int, tuple[Tensor, Any]]  # by id of a Tensor: it, and whose value it is


class Readable(Protocol):
    """What a tape takes for a variable: `read()` gives its value as a Tensor."""

    def read(self) -> Tensor: ...


class Entry(NamedTuple):
    """One operation that ran: `backward(dy, needs)` gives one gradient per input.

    `needs[i]` says whether anybody wants the gradient of input i; where not, None will do. Where it
    is an InBucket the gradient may be put there (`bucket_of`). What is returned is new, or is `dy`
    or a view of it, and several of those may overlap; it must not overlap what the closure keeps.
    """

    output: Tensor
    inputs: tuple[Tensor, ...]
    backward: Backward


def bucket_of(need: Need) -> Array | None:
    """Return the array that a gradient is wanted in; None where any will do."""
    return need.array if isinstance(need, InBucket) else None


class _Active(threading.local):
    """The tapes that record in this thread, the innermost last."""

    def __init__(self) -> None:
        self.tapes: list[GradientTape] = []


_active = _Active()


def record(array: Array, inputs: tuple[Tensor, ...], backward: Backward) -> Tensor:
    """Return the Tensor of an operation's result, on its inputs' device, and write it down."""
    output = Tensor(array, inputs[0].device)
    for tape in _active.tapes:
        for tensor in inputs:
            if id(tensor) in tape._reached:
                tape._reached.add(id(output))
                tape._entries.append(Entry(output, inputs, backward))
                break
    return output


def read(variable: Readable, tensor: Tensor) -> None:
    """Tell this thread's tapes that reading `variable`, if trainable or watched, gave `tensor`."""
    for tape in _active.tapes:
        if id(variable) in tape._watched or getattr(variable, "trainable", False):
            tape._reached.add(id(tensor))
            tape._readings[id(tensor)] = (tensor, variable)


def pause() -> list[GradientTape]:
    """Let no tape of this thread record until `resume` is given what this returns."""
    tapes, _active.tapes = _active.tapes, []
    return tapes


def resume(tapes: list[GradientTape]) -> None:
    """Let the tapes that `pause` returned record again, and no others."""
    _active.tapes = tapes


@contextmanager
def stop_recording() -> Iterator[None]:
    """Let no tape of this thread record what runs within."""
    tapes = pause()
    try:
        yield
    finally:
        resume(tapes)


class GradientTape:
    """Record operations within a `with` block; then `gradient` differentiates.

    Trainable variables are watched when they are read; `watch` adds Tensors and other variables.
    A tape gives one gradient and frees its memory during the walk, unless `persistent`. Tapes may
    be nested: each of them records. What `gradient` itself computes is never recorded, so there
    are no gradients of gradients.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self._entries: list[Entry] = []
        self._reached: set[int] = set()  # ids of Tensors that depend on something watched
        self._watched: dict[int, Any] = {}
        self._readings: Readings = {}
        self._used = False
        self._span: AbstractContextManager[None] = observe.nothing

    def __enter__(self) -> GradientTape:
        if self in _active.tapes:
            raise ContextError("this tape records already; a second `with` needs a tape of its own")
        if self._used:
            raise ContextError("this tape has given its gradient; make a new GradientTape")
        _active.tapes.append(self)
        if observe.watching:
            self._span = observe.span("forward", "what a tape records")
            self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in _active.tapes:
            _active.tapes.remove(self)
        span, self._span = self._span, observe.nothing
        span.__exit__(kind, error, traceback)

    def watch(self, source: Tensor | Readable) -> None:
        """Let gradients be taken of a Tensor, or of a variable that is read from now on."""
        self._watched[id(source)] = source
        self._reached.add(id(source))

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Let this tape not record what runs within."""
        recording = self in _active.tapes
        if recording:
            _active.tapes.remove(self)
        try:
            yield
        finally:
            if recording:
                _active.tapes.append(self)

    def gradient(
        self, target: Tensor, sources: Any, sink: Sink | None = None, into: Into | None = None
    ) -> Any:
        """Return d(sum of target)/d(source), in the structure of `sources`.

        `sources` is a Tensor, a variable or any nesting of them; one that `target` does not
        depend on gives None. Gradients are Tensors, or IndexedSlices of a table of which only
        rows were used. The arrays are the caller's own: none is shared with another gradient, an
        input or the tape. What is used several times is summed in backward order, so the same
        program gives the same bits.

        With `sink` nothing is returned: `sink(source, array)` takes each gradient as soon as no
        entry that is left can add to it, the source used last in the forward pass first; for a
        source that `target` does not depend on it is not called. `into(source)` may say in which
        array the sink would like a gradient; it is computed there where that spares a copy, and
        else is another one.

        Raises ContextError if the tape is not persistent and has given its gradient.
        """
        if self._used:
            raise ContextError(
                "this tape has given its gradient and freed its memory; take all gradients in one "
                "call, or make it GradientTape(persistent=True)"
            )
        if not isinstance(target, Tensor):
            raise TypeError(
                f"gradient: the target is a {type(target).__name__}; it must be one Tensor"
            )
        if kind(target.dtype) != "f":
            raise ShapeError(
                f"gradient: a target of dtype {target.dtype} (and shape {target.shape}) has no "
                f"derivative; only floating-point ones have"
            )
        leaves, structure = optree.tree_flatten(sources, none_is_leaf=False)
        if self.persistent:
            entries, readings = list(self._entries), self._readings
        else:
            entries, readings = self._entries, self._readings
            self._entries, self._readings, self._used = [], {}, True
            self._reached.clear()
            if self in _active.tapes:
                _active.tapes.remove(self)

        results: list[Tensor | IndexedSlices | None] = [None] * len(leaves)

        def keep(index: int, gradient: Gradient) -> None:
            if observe.watching:
                name = getattr(leaves[index], "name", "")
                observe.tick("gradient", name, bytes=_memory(gradient).nbytes)
            if sink is not None:
                sink(leaves[index], gradient)
                return
            sparse = isinstance(gradient, IndexedSlices)
            results[index] = gradient if sparse else Tensor(gradient, target.device)

        with observe.span("backward", "back through the tape"):
            _Walk(target, leaves, entries, readings, into).run(keep)
        if sink is not None:
            return None
        return optree.tree_unflatten(structure, results)


class _Walk:
    """One walk back over `entries`, from `target` to the leaves.

    Two passes before it find which entries lie between leaves and target, and how often a leaf is
    still to be used; so its gradient is known to be final the moment it is.

    `_gradients` holds what has been summed so far by id of Tensor, and whether its memory is that
    Tensor's alone: only then may it be added to in place or handed out without a copy.
    """

    def __init__(
        self,
        target: Tensor,
        leaves: Sequence[Any],
        entries: list[Entry],
        readings: Readings,
        into: Into | None = None,
    ) -> None:
        self._ops = target.device.ops
        self._target = target
        self._entries = entries
        self._gradients: dict[int, tuple[Gradient, bool]] = {}
        self._leaves = leaves
        self._into = into

        self._positions: dict[int, list[int]] = {}  # id of a leaf -> where it stands in `leaves`
        for position, leaf in enumerate(leaves):
            self._positions.setdefault(id(leaf), []).append(position)
        self._owners: dict[int, list[int]] = {  # id of a Tensor -> ids of the leaves it adds to
            id(leaf): [id(leaf)] for leaf in leaves if isinstance(leaf, Tensor)
        }
        for tensor, variable in readings.values():
            if id(variable) in self._positions:
                self._owners.setdefault(id(tensor), []).append(id(variable))

        live = self._live = set(self._owners)  # ids of Tensors that depend on a leaf
        for output, inputs, _ in entries:
            for tensor in inputs:
                if id(tensor) in live:
                    live.add(id(output))
                    break

        self._computed: set[int] = set()  # ids of the results that the walk passes
        uses: dict[int, int] = {}  # how many uses of a Tensor are still to come
        self._uses = uses
        wanted = {id(target)}
        for output, inputs, _ in reversed(entries):
            if id(output) in wanted and id(output) in live:
                self._computed.add(id(output))
                for tensor in inputs:
                    key = id(tensor)
                    if key in live:
                        wanted.add(key)
                        uses[key] = uses.get(key, 0) + 1

        self._totals: dict[int, Gradient] = {}  # by id of leaf, over the Tensors it was read as
        self._parts: dict[int, int] = {}  # how many of those are still to come
        for tensor_id, owners in self._owners.items():
            if tensor_id in wanted:
                for leaf in owners:
                    self._parts[leaf] = self._parts.get(leaf, 0) + 1

    def run(self, emit: Callable[[int, Gradient], object]) -> None:
        """Walk back, freeing entries on the way, and call `emit(position in leaves, gradient)`."""
        target = self._target
        if id(target) not in self._live:
            return
        self._gradients[id(target)] = self._ops.full(target.shape, 1, target.dtype), True
        if id(target) in self._owners:
            self._settle(id(target), emit)

        while self._entries:
            entry = self._entries.pop()
            if id(entry.output) not in self._computed:
                continue
            dy, alone = self._gradients.pop(id(entry.output))
            if isinstance(dy, IndexedSlices):
                dy, alone = dy.to_dense().array, True
            self._spread(entry, dy, alone)
            for tensor in entry.inputs:
                key = id(tensor)
                if key in self._uses:
                    self._uses[key] -= 1
                    if not self._uses[key]:
                        del self._uses[key]
                        if key in self._owners:
                            self._settle(key, emit)

    def _spread(self, entry: Entry, dy: Array, alone: bool) -> None:
        """Add what an entry's closure returns to the gradients of its inputs."""
        ops = self._ops
        needs: list[Need] = [id(tensor) in self._live for tensor in entry.inputs]
        if self._into is not None:
            pairs = zip(needs, entry.inputs, strict=True)
            needs = [need and self._need(id(tensor)) for need, tensor in pairs]
        gradients = entry.backward(dy, needs)
        passed = [
            need and ops.share_memory(_memory(dx), dy)
            for dx, need in zip(gradients, needs, strict=True)
        ]
        may_pass = alone and sum(passed) == 1  # dy's memory has exactly one heir
        for tensor, need, dx, is_dy in zip(entry.inputs, needs, gradients, passed, strict=True):
            if not need:
                continue
            held = self._gradients.get(id(tensor))
            if held is None:
                self._gradients[id(tensor)] = dx, may_pass or not is_dy
            else:
                self._gradients[id(tensor)] = self._add(*held, dx), True

    def _need(self, key: int) -> Need:
        """Return how the gradient of a live Tensor is wanted: where, if it is all a leaf gets."""
        owners = self._owners.get(key, ())
        whole = self._uses[key] == 1 and key not in self._gradients
        if len(owners) != 1 or not whole or key in self._computed:
            return True
        (leaf,) = owners
        if self._parts[leaf] > 1 or leaf in self._totals or len(self._positions[leaf]) > 1:
            return True
        assert self._into is not None
        array = self._into(self._leaves[self._positions[leaf][0]])
        return True if array is None else InBucket(array)

    def _add(self, held: Gradient, alone: bool, more: Gradient) -> Gradient:
        """Return the sum, in the memory of `held` where that is its alone."""
        if isinstance(held, IndexedSlices):
            if isinstance(more, IndexedSlices):
                return concatenate([held, more])
            held, alone = held.to_dense().array, True
        elif isinstance(more, IndexedSlices):
            more = more.to_dense().array
        if not alone:
            return self._ops.add(held, more)
        self._ops.accumulate(held, more)
        return held

    def _copy(self, gradient: Gradient) -> Gradient:
        sparse = isinstance(gradient, IndexedSlices)
        return gradient.copy() if sparse else self._ops.copy(gradient)

    def _settle(self, key: int, emit: Callable[[int, Gradient], object]) -> None:
        """Hand out the final gradient of a Tensor to the leaves that it belongs to."""
        gradient, alone = self._gradients[key]
        if key in self._computed:  # the walk still needs it, to go on from here
            alone = False
        else:
            del self._gradients[key]
        for leaf in self._owners[key]:
            part = gradient if alone else self._copy(gradient)
            alone = False
            if leaf in self._totals:
                part = self._add(self._totals[leaf], True, part)
            self._totals[leaf] = part
            self._parts[leaf] -= 1
            if not self._parts[leaf]:
                total = self._totals.pop(leaf)
                for copy, position in enumerate(self._positions[leaf]):
                    emit(position, self._copy(total) if copy else total)


def _memory(gradient: Gradient) -> Array:
    """Return the array that holds a gradient's numbers."""
    return gradient.values.array if isinstance(gradient, IndexedSlices) else gradient
