"""Workers: threads that read the pieces of batches, so that several are on their way at a time.

Pieces are begun in the order in which they were given. Whoever waits for a batch gets the failure
of the first piece of it that failed, once all of its pieces are over, so that what is raised does
not depend on how many workers there are.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from minidist import observe, threads
from minidist.device import host
from minidist.errors import ClosedError, ForkError
from minidist.kernels.rendezvous import Fence
from minidist.patience import DEADLINE, REPORT_AFTER, Waiting, stack

Piece = Callable[[], None]
GRACE = 0.5  # seconds that `close` gives the threads to notice


class Reading:
    """Pieces that were given together: how many are over, and which failed."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.over = Fence()  # raised with each piece
        self.failures: dict[int, BaseException] = {}
        self.at_work: dict[int, threading.Thread] = {}

    def do(self, number: int) -> None:
        """Read a piece."""
        self.at_work[number] = threading.current_thread()
        try:
            self.pieces[number]()
        except BaseException as failure:
            self.failures[number] = failure
        del self.at_work[number]
        self._is_over()

    def drop(self, number: int) -> None:
        """Tell whoever waits that nobody will read a piece any more."""
        self.failures[number] = ClosedError("the workers were closed before they read this batch")
        self._is_over()

    def _is_over(self) -> None:
        if observe.watching:
            observe.gave(self)
        self.over.advance()


class _Queue:
    """What the threads know: not the Workers, so that these can be dropped."""

    def __init__(self) -> None:
        self.pieces: deque[tuple[Reading, int]] = deque()
        self.given = Fence()  # raised with each piece
        self.stopped = False
        self._tickets = itertools.count(1)  # piece number n is read by who holds ticket n

    def stop(self) -> None:
        self.stopped = True
        self.given.lift()

    def work(self) -> None:
        host().settle()
        while True:
            ticket = next(self._tickets)
            if observe.watching:
                observe.waiting(partial(self._has, ticket))
            self.given.wait(ticket)
            try:
                reading, number = self.pieces.popleft()
            except IndexError:  # closed
                return
            if self.stopped:
                reading.drop(number)
                return
            reading.do(number)
            del reading  # its memory is the consumer's while this thread waits

    def _has(self, ticket: int) -> bool:
        return self.given.value >= ticket


class Workers:
    """`count` threads; `name` says in errors and in the threads' names what they read.

    They end when the Workers are closed, or when nobody refers to them any more. A context manager
    that closes itself. Raises ThreadError where the system starts no more threads.
    """

    def __init__(self, count: int, name: str, deadline: float = DEADLINE) -> None:
        self._name = name
        self._deadline = deadline
        self._queue = _Queue()
        self._pid = os.getpid()
        weakref.finalize(self, self._queue.stop).atexit = False
        _all.add(self)
        self._threads = [
            threading.Thread(
                target=self._queue.work, name=f"minidist worker {number} of {name}", daemon=True
            )
            for number in range(count)
        ]
        for thread in self._threads:
            threads.start(thread)

    def give(self, pieces: Sequence[Piece]) -> Reading:
        """Let the pieces be read, after those that were given before."""
        reading = Reading(pieces)
        self._queue.pieces.extend((reading, number) for number in range(len(pieces)))
        self._queue.given.advance(len(pieces))
        return reading

    def wait(self, reading: Reading) -> None:
        """Return when all pieces have been read.

        Raises what the first that failed has raised; ClosedError where the workers are closed
        meanwhile; HangError, which names the worker, where the pieces are not over within the
        deadline; ForkError in a process forked from that of the threads.
        """
        if os.getpid() != self._pid:
            raise ForkError(
                f"this process ({os.getpid()}) was forked from {self._pid}, whose threads read "
                f"{self._name}, and threads do not survive a fork; iterate in the child anew"
            )
        waiting = Waiting(REPORT_AFTER, self._deadline)
        while reading.over.value < len(reading.pieces):
            waiting.tick(reading.over, len(reading.pieces), partial(self._lacking, reading))
        if observe.watching:
            observe.took(reading)
        if reading.failures:
            number = min(reading.failures)
            failure = reading.failures.pop(number)
            reading.failures.clear()  # a traceback refers to its frames: no circle
            raise failure

    def _lacking(self, reading: Reading) -> str:
        at_work = sorted(reading.at_work.copy().items())
        where = "".join(f"\n{thread.name!r} is at\n{stack(thread)}" for _, thread in at_work)
        return (
            f"{len(reading.pieces) - reading.over.value} of {len(reading.pieces)} pieces of a "
            f"batch of {self._name} were not read{where}"
        )

    def close(self) -> None:
        """End the threads; pieces that were not begun are dropped. Closing twice is fine."""
        self._queue.stop()
        while self._queue.pieces:
            with suppress(IndexError):  # a thread has just taken the last one
                reading, number = self._queue.pieces.popleft()
                reading.drop(number)
        if os.getpid() != self._pid:
            return
        end = time.monotonic() + GRACE
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_all: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter is taken down around them."""
    for workers in list(_all):
        workers.close()
