"""Distributed data sets, and the iterators that hand out their batches.

    for batch in dataset: ...             # from the beginning each time; break and return as ever
    batch = dataset.get_next()            # or one at a time; EndOfDataError after the last
    batch = dataset.get_next_as_optional()  # or by asking has_value()

Every leaf of a batch is a PerReplica of Tensors that are already on the replicas' devices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from minidist import context, observe
from minidist.comm.peers import Patience, Peers
from minidist.device import Device
from minidist.errors import ContextError, EndOfDataError, UsageError
from minidist.input.place import place
from minidist.input.reader import Reader
from minidist.input.rounds import Round, Rounds
from minidist.input.together import Placed, Together

S = TypeVar("S")


class OptionalBatch:
    """A batch, or the fact that there is no more."""

    __slots__ = ("_values",)

    def __init__(self, *values: Any) -> None:
        self._values = values

    def has_value(self) -> bool:
        return bool(self._values)

    def get_value(self) -> Any:
        """Return the batch. Raises UsageError (a ValueError) where there is none."""
        if not self._values:
            raise UsageError("there is no batch here: the data has ended; ask has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"OptionalBatch({', '.join(map(repr, self._values))})"


class DistributedIterator:
    """The batches of a data set, read ahead by a thread of its own.

    The thread ends when the data does, when the iterator is closed, and when nobody refers to the
    iterator any more. Closed, it has no more batches. It is also a context manager that closes
    itself.
    """

    def __init__(
        self, name: str, devices: tuple[Device, ...], batches: Together, patience: Patience
    ) -> None:
        self.devices = devices
        self._name = name
        self._batches = batches
        self._patience = patience
        weakref.finalize(self, batches.stop).atexit = False

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises what the data set raises, in its turn; HangError where a batch does not come within
        the strategy's deadline; ContextError inside a replica. With data of each worker's own, also
        what Peers.meet raises.
        """
        frame = context.frame()
        if frame.replica is not None and context.has_strategy():
            raise ContextError(
                f"a batch of {self._name} was asked for in {context.describe(frame)}, but it is "
                "for all replicas: take it outside run and pass it in"
            )
        with observe.span("input", "the next batch"):
            return self._batches.take(self._patience)

    def get_next(self) -> Any:
        """Return the next batch, as `next` does. Raises EndOfDataError where there is none."""
        for batch in self:
            return batch
        raise EndOfDataError(f"{self._name} has no more batches; iterate over it anew")

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch in an OptionalBatch, without one at the end."""
        for batch in self:
            return OptionalBatch(batch)
        return OptionalBatch()

    def close(self) -> None:
        """End the reading. Closing twice is fine."""
        self._batches.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<iterator over {self._name}>"


class DistributedDataset:
    """Batches for the replicas on `devices`, made by `rounds` from one or several sources.

    Iterating gives a new iterator from the beginning. `get_next` and `get_next_as_optional` use one
    that the data set keeps; `close` ends it, and the next call begins anew.
    prefetch: how many batches at most are read ahead. drop_remainder: leave out batches that have
    fewer examples than the first. peers: the workers that have batches too, and ends: how those end
    together; see minidist.input.together.
    """

    def __init__(
        self,
        sources: Sequence[Iterable[Any]],
        rounds: Rounds,
        devices: Sequence[Device],
        patience: Patience,
        *,
        prefetch: int,
        drop_remainder: bool,
        peers: Peers | None = None,
        ends: str | None = None,
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
            raise UsageError(f"prefetch must be a number of batches, at least 1, not {prefetch!r}")
        for source in sources:
            if not isinstance(source, Iterable):
                raise UsageError(f"a data set is made of an iterable of batches, not of {source!r}")
        self.devices = tuple(devices)
        self._sources = sources
        self._rounds = rounds
        self._patience = patience
        self._prefetch = prefetch
        self._drop_remainder = drop_remainder
        self._peers = Peers() if peers is None else peers
        self._ends = ends
        self._name = f"the data set {', '.join(dict.fromkeys(map(_name, sources)))}"
        self._begun = False
        self._own: DistributedIterator | None = None
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()

    def __iter__(self) -> DistributedIterator:
        """Begin to read. Raises UsageError (a ValueError) where that is impossible again."""
        iterators = [iter(source) for source in self._sources]
        if self._begun and any(
            iterator is source for iterator, source in zip(iterators, self._sources, strict=True)
        ):
            raise UsageError(
                f"{self._name} was made of an iterator, which can be read only once, and that has "
                "begun; make it of something that can be iterated over again"
            )
        self._begun = True
        first = iter([iterators])  # those that were just made; later ones begin anew
        begin = partial(
            _read,
            self._sources,
            first,
            self._rounds,
            self.devices,
            ahead=self._prefetch,
            name=self._name,
            frame=context.frame().but(run=None, draws={}, scope=None, outer=None),
        )
        batches = Together(begin, self.devices, self._peers, self._ends, self._drop_remainder)
        iterator = DistributedIterator(self._name, self.devices, batches, self._patience)
        self._iterators.add(iterator)
        return iterator

    def get_next(self) -> Any:
        """Return the next batch. Raises EndOfDataError where there is none."""
        return self._kept().get_next()

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch in an OptionalBatch, without one at the end."""
        return self._kept().get_next_as_optional()

    def _kept(self) -> DistributedIterator:
        if self._own is None:
            self._own = iter(self)
        return self._own

    def reduce(self, initial: S, fn: Callable[[S, Any], S]) -> S:
        """Fold the data set: return fn(… fn(fn(initial, batch 0), batch 1) …, last batch)."""
        state = initial
        for batch in self:
            state = fn(state, batch)
        return state

    def close(self) -> None:
        """End all reading of this data set. A later loop or `get_next` begins anew."""
        self._own = None
        for iterator in list(self._iterators):
            iterator.close()

    def __repr__(self) -> str:
        return f"<{self._name} on {', '.join(device.short for device in self.devices)}>"


def _read(
    sources: Sequence[Iterable[Any]],
    first: Iterator[list[Iterator[Any]]],
    rounds: Rounds,
    devices: Sequence[Device],
    **how: Any,
) -> Reader:
    """Begin to read sources, with their first iterators or else new ones, onto devices."""
    iterators = next(first, None) or [iter(source) for source in sources]
    return Reader(map(partial(_placed, devices), rounds(sources, iterators)), **how)


def _placed(devices: Sequence[Device], item: Round) -> Placed:
    return Placed(place(item, devices), item.examples)


def _name(source: Any) -> str:
    return repr(getattr(source, "__qualname__", None) or type(source).__qualname__)
