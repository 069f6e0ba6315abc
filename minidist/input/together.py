"""Together: the batches of one worker, which end when those of the other workers do.

Where every worker reads data of its own, one may have more than another. Before each batch the
workers meet, and each says whether it has one. What then happens has a name:

    join    who has no more gets empty batches, until nobody has any
    drop    the first to have no more ends it for all
    pad     who has no more begins anew, until everybody has had all of its own

Of global batches every worker has its part, so all end by themselves and nobody needs to ask.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist import observe
from minidist.comm.peers import Patience, Peers
from minidist.device import Device
from minidist.errors import UsageError
from minidist.input.outline import empty, outline
from minidist.input.place import place
from minidist.input.reader import Reader
from minidist.input.rounds import Round, empty_like
from minidist.structure import map_leaves
from minidist.values import PerReplica

ENDS = ("join", "drop", "pad")
OFFER = struct.Struct("<?Q")  # whether there is a batch, and its examples; an outline follows


class Placed(NamedTuple):
    """A batch on the devices, and how many examples it was made of."""

    values: Any
    examples: int


class Together:
    """Takes what a reader has placed, in step with the other workers.

    begin: makes the reader, which begins anew each time. peers: the other workers; they are met
    only where `ends` says how their batches end. drop_remainder: leave out batches that have fewer
    examples, over all workers, than the first.
    """

    def __init__(
        self,
        begin: Callable[[], Reader],
        devices: Sequence[Device],
        peers: Peers,
        ends: str | None,
        drop_remainder: bool,
    ) -> None:
        self._begin = begin
        self._reader = begin()
        self._devices = devices
        self._peers = peers
        self._ends = ends
        self._least = 0 if drop_remainder else None
        self._taking = observe.Lock()
        self._taken = 0  # batches, those that were left out too
        self._ended = False  # this worker's own data
        self._over = False
        self._latest: Any = None  # values of a batch, to make an empty one from
        self._look = ""  # the outline of the first batch that any worker had

    def take(self, patience: Patience) -> Any:
        """Return the next batch. Raises StopIteration after the last one and after `close`."""
        with self._taking:
            try:
                while True:
                    placed = self._next(patience)
                    if self._least is None:
                        return placed.values
                    self._least = self._least or placed.examples
                    if placed.examples >= self._least:
                        return placed.values
            except StopIteration:
                raise
            except BaseException as failure:
                self._peers.fail(failure)
                raise

    def _next(self, patience: Patience) -> Placed:
        if self._over:
            raise StopIteration
        own = None if self._ended else self._read(patience)
        if self._over:  # closed just now
            raise StopIteration
        self._ended = own is None
        has, examples = self._ask(own)
        if not any(has) or (self._ends == "drop" and not all(has)):
            self.close()
            raise StopIteration
        if own is not None:
            self._latest = own.values
        elif self._ends == "pad":
            own = self._repeated(patience)
        else:
            own = Placed(place(Round(self._empty(), 0), self._devices), 0)
        return Placed(own.values, examples)

    def _read(self, patience: Patience) -> Placed | None:
        try:
            placed: Placed = self._reader.take(patience)
        except StopIteration:
            return None
        return placed

    def _ask(self, own: Placed | None) -> tuple[list[bool], int]:
        """Say whether there is a batch here; return the same of all, and the examples of all."""
        self._taken += 1
        has, examples = own is not None, 0 if own is None else own.examples
        if self._ends is None:
            return [has], examples
        offer = OFFER.pack(has, examples)
        if own is not None and self._taken == 1:
            offer += outline(own.values).encode()
        offers = self._peers.meet(f"take batch {self._taken} of a data set", offer)
        numbers = [OFFER.unpack_from(each) for each in offers]
        looks = [each[OFFER.size :].decode() for each in offers]
        self._look = self._look or next(filter(None, looks), "")
        return [each[0] for each in numbers], sum(each[1] for each in numbers)

    def _repeated(self, patience: Patience) -> Placed:
        """Return a batch of the data that has ended, from its beginning."""
        placed = self._read(patience)
        if placed is None:
            self._reader = self._begin()
            placed = self._read(patience)
        if placed is None:
            raise UsageError(
                f"ends='pad' lets {self._peers.names[self._peers.me]} repeat its data, but there "
                "is nothing to repeat: it is an iterator, which can be read only once, or has no "
                "elements"
            )
        return placed

    def _empty(self) -> Any:
        """Return a batch without examples, like the latest one or, if there was none, others'."""
        if self._latest is not None:
            return map_leaves(_emptied, self._latest)
        if not self._look:
            raise UsageError(
                f"{self._peers.names[self._peers.me]} has no data at all, and cannot know what the "
                "other workers' batches look like: they are no lists, tuples and dicts of arrays; "
                "give it an empty batch of theirs"
            )
        return empty(self._look, len(self._devices))

    def stop(self) -> None:
        """Let the reading end without waiting for it; nothing can be taken any more."""
        self._over = True
        self._reader.stop()

    def close(self) -> None:
        """End the reading and drop what was read ahead. Closing twice is fine."""
        self._over = True
        self._reader.close()


def _emptied(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    return PerReplica(None, [empty_like(part.array) for part in leaf.values])
