"""Checker: the observer that finds accesses to the same bytes which nothing orders.

Every access is compared with the last ones to the same bytes: it must have seen the last write, and
a write also all reads since. What one has seen goes on from thread to stream and from thread to
thread where they wait for each other, and nowhere else; that the two were apart in time, this time,
is no order.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from minidist import observe
from minidist.checking.clocks import Actor, StreamActor
from minidist.checking.handovers import HAND_OVERS
from minidist.checking.memory import Buffer, Cell, Memory, extent, on_gpu, owner_of, poison, span
from minidist.checking.orders import Orders
from minidist.checking.places import Access, Race, Stack, race, stack
from minidist.checking.verbs import VERBS
from minidist.device import known
from minidist.device.cpu import ThreadEvent
from minidist.errors import RaceError, UsageError
from minidist.kernels import heap
from minidist.patience import DEADLINE
from minidist.variable import Copy

log = logging.getLogger("minidist")


class Checker(Orders):
    """Listens from `begin_checking` to `end_checking`; `races` are the ones found so far.

    Each pair of places is reported once: logged at once, raised by `verify`.
    """

    careful = True

    def __init__(self) -> None:
        super().__init__()
        self.races: list[Race] = []
        self._unraised: list[Race] = []
        self._known: set[frozenset[str]] = set()
        self._memory = Memory()

    # --- memory

    def accessed(self, reads: Sequence[Any], writes: Sequence[Any], what: str) -> None:
        with self._lock:
            self._touch(reads, writes, self._access(self._actor(), what, stack(3)))

    def _access(self, actor: Actor, what: str, where: Stack) -> Access:
        return Access(actor, what, where, self._here.submitted[-1])

    def _touch(self, reads: Sequence[Any], writes: Sequence[Any], access: Access) -> None:
        for arrays, kind in ((reads, False), (writes, True)):
            for array in arrays:
                if array.size:
                    self._compare(self._memory.buffer(array), array, access, kind)

    def _compare(self, buffer: Buffer, array: Any, access: Access, writes: bool) -> None:
        if buffer.freed is not None and not self._is_awaited(buffer, access.actor):
            self._report(array, (buffer.freed, "return to the pool"), (access, _kind(writes)))
        for cell in buffer.between(*span(array)):
            self._compare_cell(cell, array, access, writes)
            if not writes:
                cell.reads[access.actor.number] = access
                continue
            cell.write = access
            if cell.reads:
                cell.reads = {}

    def _compare_cell(self, cell: Cell, array: Any, access: Access, writes: bool) -> None:
        last, clock = cell.write, access.actor.clock
        if last is not None and last.time > clock.get(last.actor.number, 0):
            self._report(array, (last, "write"), (access, _kind(writes)))
        if writes:
            for number, read in cell.reads.items():
                if read.time > clock.get(number, 0):
                    self._report(array, (read, "read"), (access, "write"))

    def _is_awaited(self, buffer: Buffer, actor: Actor) -> bool:
        """Whether what an actor does is before an event that the pool waits for.

        Or may be, where that is an event of a kind of stream that tells nothing.
        """
        for event in buffer.events:
            stream = getattr(event, "stream", None)
            if stream in self._streams:
                if isinstance(actor, StreamActor) and actor.stream is stream:
                    return bool(actor.position <= event.position)
            elif not self._is_done(event):
                return True
        return False

    def _is_done(self, event: Any) -> bool:
        """Ask an event without waiting for it in anybody's name."""
        self._here.looking = True
        try:
            return bool(event.done())
        finally:
            self._here.looking = False

    def given_back(self, array: Any, events: Sequence[Any], shared: bool) -> None:
        self._lock.later(partial(self._given_back, array, events, shared, stack(3)))

    def _given_back(self, array: Any, events: Sequence[Any], shared: bool, where: Stack) -> None:
        buffer = self._memory.buffer(array)
        actor = self._actor()
        if shared:  # the views are gone, and with them those who read through them
            buffer.forget_reads()
        buffer.events = tuple(events)
        buffer.freed = Access(actor, "release", where, self._here.submitted[-1])
        buffer.released = actor.give()
        if not on_gpu(array):
            self._poison(buffer, array)

    def leased(self, array: Any) -> None:
        with self._lock:
            buffer = self._memory.buffer(array)
            actor = self._actor()
            buffer.freed = None
            actor.take(buffer.released)
            if on_gpu(array):  # what is done with it next follows its readers on the streams
                return
            for event in buffer.events:
                if getattr(event, "stream", None) in self._streams and self._is_done(event):
                    self.waited(event)
            self._poison(buffer, array)
            buffer.poisoned = False

    def _poison(self, buffer: Buffer, array: Any) -> None:
        """Poison a buffer that nobody reads any more."""
        if not buffer.poisoned and all(self._is_done(event) for event in buffer.events):
            poison(array)
            buffer.poisoned = True

    # --- a GPU: what threads say is to be done, and what its streams do, in their own order

    def giving(self, stream: Any, what: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        with self._lock:
            where = stack(3)
            said = self._access(self._actor(), what, where)
            done = self._access(self._given_to(stream), what, where)
            for arrays, kind in ((reads, False), (writes, True)):
                for array in arrays:
                    if not on_gpu(array):
                        self._touch(() if kind else [array], [array] if kind else (), done)
                    elif array.size:
                        self._compare(self._memory.buffer(array), array, said, kind)
                        addresses = self._memory.of_gpu(array.data.device_id)
                        self._compare(addresses, array, done, kind)

    def allocated(self, block: Any, stream: Any) -> None:
        with self._lock:
            where = stack(3)
            low, high = extent(block)
            self._memory.buffer_of(block).cells[0].write = self._access(
                self._actor(), "allocate", where
            )
            addresses = self._memory.of_gpu(block.device_id)
            done = self._access(self._given_to(stream), "allocate", where)
            for cell in addresses.between(low, high):
                self._compare_cell(cell, block, done, True)
            addresses.renew(low, high, Cell(done, {}))

    def mapped(self, memory: Any) -> None:
        with self._lock:
            addresses = self._memory.of_gpu(memory.device_id)
            addresses.renew(memory.ptr, memory.ptr + memory.size, Cell(None, {}))

    # --- what was found

    def _report(self, array: Any, first: tuple[Access, str], second: tuple[Access, str]) -> None:
        lines = first[0].line(), second[0].line()
        if frozenset(lines) in self._known:
            return
        self._known.add(frozenset(lines))
        told = [access.told(kind) for access, kind in (first, second)]
        found = race(_memory_name(array), told, lines, _cure(first, second))
        self.races.append(found)
        self._unraised.append(found)
        log.error("%s", found)

    def verify(self) -> None:
        """Raise RaceError for the races that were found since the last call."""
        found, self._unraised = self._unraised, []
        if found:
            raise RaceError("\n".join(map(str, found)))

    # --- from when to when

    def begin_checking(self) -> None:
        _finish()  # what was given before was not heard of
        VERBS.begin()
        heap.poison(1)
        HAND_OVERS.begin()
        observe.attach(self)

    def end_checking(self) -> None:
        _finish()
        observe.detach(self)
        HAND_OVERS.end()
        heap.poison(-1)
        VERBS.end()


class check:
    """Check from now on; as a with statement's way, until its end, which raises RaceError.

    `races` are those found so far.
    """

    def __init__(self) -> None:
        self._checker = Checker()
        self._on = True
        self._checker.begin_checking()

    @property
    def races(self) -> Sequence[Race]:
        return tuple(self._checker.races)

    def verify(self) -> None:
        """Raise RaceError for the races that were found and not raised yet."""
        self._checker.verify()

    def end(self) -> None:
        """Check no more. Ending twice is fine."""
        if self._on:
            self._on = False
            self._checker.end_checking()

    def __enter__(self) -> check:
        if not self._on:
            raise UsageError("this check has ended; make a new one with md.check()")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end()
        if kind is None:
            self.verify()


def _finish() -> None:
    """Let all streams do what they were given; that it fails, those hear who wait for it."""
    for device in known():
        for stream in device.streams:
            event = stream.record()
            if isinstance(event, ThreadEvent):
                event.stream.finished.wait(event.position, DEADLINE)
            else:
                event.wait(DEADLINE)


def _kind(writes: bool) -> str:
    return "write" if writes else "read"


def _memory_name(array: Any) -> str:
    """Say what an array is: of which variable, if it is one's."""
    if not hasattr(array, "dtype"):
        return f"{array.size} bytes of {array.on.short}'s memory, which are used anew"
    owner = owner_of(array)
    start, end = span(array)
    what = f"{array.dtype}{list(array.shape)}"
    for copy in gc.get_objects():
        if isinstance(copy, Copy) and owner_of(copy.array) is owner:
            low, high = span(copy.array)
            if low < end and start < high:
                return f"variable {copy.name!r} on {copy.device.short} ({what})"
    return what


def _cure(first: tuple[Access, str], second: tuple[Access, str]) -> str:
    if first[1] == "return to the pool":
        return (
            "Release a lease after its last use, or after the events of those who still use its "
            "buffer"
        )
    for access, _ in (first, second):
        if isinstance(access.actor, StreamActor):
            return (
                f"Take an event of {access.actor.name} by record() after its work was given, and "
                "let the other wait for it; or do the other before the work is given"
            )
    return (
        "Meet between the two (merge_call), hand over by a StagingArea, a queue or a thread's "
        "join, or give each its own memory"
    )
