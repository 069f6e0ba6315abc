"""Reading ahead: a thread takes items from an iterator before somebody asks for them.

Guarantees
  * At most `ahead` items are read, or being read, beyond those that were taken.
  * What the iterator raises is raised by `take`, in its turn, after the items before it.
  * Who waits for an item is told of a reader that does not deliver: a report, then a HangError.
  * The thread ends with the items, with `close`, with `stop`, and before the interpreter. One that
    is in the middle of reading ends when that returns; it cannot be ended from outside.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from minidist import context, observe, threads
from minidist.comm.peers import Patience
from minidist.device import host
from minidist.errors import ForkError, HangError
from minidist.kernels.rendezvous import Fence
from minidist.patience import stack

log = logging.getLogger("minidist")

GRACE = 0.5  # seconds that `close` gives the thread to notice
TICK = 0.05  # seconds between two looks of a waiting thread at signals and deadlines


@dataclass
class _End:
    """The end of the items, by an exception or not."""

    failure: BaseException | None


class Reader:
    """Reads `items` ahead; `name` says in errors and in the thread's name what they are.

    The thread works in the given frame. Any number of threads may `take`.
    """

    def __init__(
        self, items: Iterator[Any], *, ahead: int, name: str, frame: context.Frame
    ) -> None:
        self._ahead = ahead
        self._name = name
        self._queue: deque[Any] = deque()
        self._given = Fence()  # raised with each item that was read
        self._taken = Fence()  # raised with each item that was taken
        self._taking = observe.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._loop, args=(items, frame), name=f"minidist reader of {name}", daemon=True
        )
        threads.start(self._thread)
        _readers.add(self)

    def take(self, patience: Patience) -> Any:
        """Return the next item. Raises StopIteration after the last one and after `close`."""
        with self._taking:
            if not self._stopped:
                self._await(patience)
            if self._stopped:
                raise StopIteration
            try:  # in this order, so that an interrupt between the two loses no item
                self._taken.advance()
                item = self._queue.popleft()
            except IndexError:  # closed just now
                raise StopIteration from None
            if observe.watching:
                observe.took(self)
        if not isinstance(item, _End):
            return item
        self.close()
        try:
            raise StopIteration if item.failure is None else item.failure
        finally:
            item.failure = None  # its traceback refers to this frame: no circle

    def _await(self, patience: Patience) -> None:
        """Wait for an item. Between two waits Python handles signals."""
        if os.getpid() != self._pid:
            raise ForkError(
                f"this process ({os.getpid()}) was forked from {self._pid} while "
                f"{self._name} was read there, and threads do not survive a fork; iterate over "
                "the data set in the child anew"
            )
        since = time.monotonic()
        reported = False
        while True:
            following = self._given.value + 1
            if self._queue or self._stopped:
                return
            if observe.watching:
                observe.waiting(partial(self._has, following))
            if self._given.wait(following, TICK):
                continue
            waited = time.monotonic() - since
            report_after, deadline = patience()
            if waited > deadline:
                failure = HangError(self._report(waited, deadline))
                self.stop()
                raise failure
            if waited > report_after and not reported:
                reported = True
                log.warning("%s", self._report(waited, deadline))

    def _report(self, waited: float, deadline: float) -> str:
        return (
            f"item {self._taken.value + 1} of {self._name} is waited for since {waited:.1f} s (the "
            f"deadline is {deadline:g} s); the thread that reads it is now at\n"
            f"{stack(self._thread)}"
        )

    def stop(self) -> None:
        """Let the thread end without waiting for it; nothing can be taken any more."""
        self._stopped = True
        self._taken.lift()
        self._given.lift()

    def close(self) -> None:
        """End the thread and drop what was read ahead. Closing twice is fine."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE)
        self._queue.clear()

    def _has(self, item: int) -> bool:
        return self._given.value >= item

    def _may_read(self, item: int) -> bool:
        return self._taken.value >= item - self._ahead

    def _loop(self, items: Iterator[Any], frame: context.Frame) -> None:
        context.enter(frame)
        host().settle()
        asked = 0
        while True:
            asked += 1
            if asked > self._ahead:
                if observe.watching:
                    observe.waiting(partial(self._may_read, asked))
                self._taken.wait(asked - self._ahead)
            if self._stopped:
                return
            item = self._next(items)
            if observe.watching:
                observe.gave(self)
            self._queue.append(item)
            self._given.advance()
            if isinstance(item, _End):
                return
            del item  # its memory is the consumer's while this thread waits

    def _next(self, items: Iterator[Any]) -> Any:
        try:
            with observe.span("read", "a batch ahead"):
                return next(items)
        except StopIteration:
            return _End(None)
        except BaseException as failure:
            failure.add_note(f"raised while {self._name} was read ahead")
            return _End(failure)


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    """End the threads before the interpreter is taken down around them."""
    for reader in list(_readers):
        reader.close()
