"""StagingArea: what is put in at one end is on the device when it is taken out at the other.

A queue of tuples of tensors, first in first out. Putting copies on the device's copy stream, in
the shadow of what the device computes meanwhile.

    area = md.StagingArea(["float32", "int64"], [(None, 784), (None,)], device="cuda:0")
    area.put((images, labels))            # begins to copy
    images, labels = area.get()           # what uses them waits for the copy, and nothing else does

Each item has a slot of its own (minidist.slot), which is used again when its tensors and all their
views have been dropped, after what the consumer's stream has been given until then. So there are as
many slots as items ever were in the area or in somebody's hands at once, and then nothing is
allocated any more. On a device whose compute stream is the calling thread, `get` blocks until the
copy is done.

What may change after `put`
  * Arrays, numbers, variables and what was read from one may change as soon as it returns: it waits
    until they have been copied.
  * Other Tensors never change (a view of what was read from a variable should be no exception: put
    the variable). They are held, and copied while the program goes on.
  * With `unchanged=True` all are held. Whoever says so changes none before the event that `put`
    returns.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from minidist import context, observe
from minidist.device import Device, Event
from minidist.device import get as get_device
from minidist.device.lease import Pool
from minidist.errors import ClosedError, ForkError, UsageError
from minidist.kernels.rendezvous import Fence
from minidist.patience import DEADLINE, Waiting
from minidist.pool import SPIN
from minidist.slot import Form, Slot
from minidist.tensor import Reading, Tensor


class StagingArea:
    """A bounded queue of tuples of tensors that live on `device`, by default the current one.

    dtypes: one for each tensor of a tuple. shapes: one for each, in which None stands for any
    length, and None for any shape.
    capacity: how many items there may be in the area; those in the hands of consumers do not
    count. memory_limit: how many bytes these items may have together.

    Any number of threads may put and take. Who waits sleeps; `timeout` is in seconds, 0 to try,
    math.inf for ever. None: the patience of the current strategy, which without one is a report
    after 5 s and a HangError after 60.

    Raises UsageError (a ValueError) for other arguments.
    """

    def __init__(
        self,
        dtypes: Any,
        shapes: Sequence[Sequence[int | None] | None] | None = None,
        *,
        capacity: int = 2,
        memory_limit: int | None = None,
        device: str | Device | None = None,
    ) -> None:
        self._form = Form(dtypes, shapes)
        for name, limit in (("capacity", capacity), ("memory_limit", memory_limit)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise UsageError(f"{name} is a whole number from 1 on, not {limit!r}")
        self.capacity = capacity
        self.what = "staging"  # what instruments call the bytes that are copied
        self.memory_limit = memory_limit
        self.device = context.device() if device is None else get_device(device)
        self._slots: deque[Slot] = deque()
        self._nbytes = 0  # of all slots
        self._pool = Pool(self.device.allocate)
        self._lock = observe.Lock()
        self._added = Fence(SPIN)  # raised with each item that comes
        self._removed = Fence(SPIN)  # raised with each item that goes
        self._closed = False
        self._pid = os.getpid()

    # --- putting

    def put(self, values: Any, timeout: float | None = None, *, unchanged: bool = False) -> Event:
        """Add an item, when there is room, and return the event of its having been copied.

        values: a tuple or list of Tensors, variables, arrays and numbers; a single one stands for
        a tuple of one. They may be dropped at once. Whatever may change has been copied on return,
        unless it stays `unchanged` until the event (see the module).

        Raises ShapeError (a ValueError) for another number of values, another dtype or shape,
        UsageError for an item beyond the memory limit; HangError where no room is made in time,
        ClosedError where the area is closed, also while this waits.
        """
        if not observe.watching:
            return self._put(values, timeout, unchanged).copied
        with observe.span("put", "into a staging area", device=self.device.short):
            slot = self._put(values, timeout, unchanged)
            observe.put(slot)
        return slot.copied

    def _put(self, values: Any, timeout: float | None, unchanged: bool) -> Slot:
        waiting = self._begin(timeout)
        sources = self._form.sources(values, self)
        nbytes = sum(source.array.nbytes for source in sources)
        if self.memory_limit is not None and nbytes > self.memory_limit:
            raise UsageError(
                f"an item of {nbytes} bytes can never be put into {self!r}, whose memory_limit "
                "is smaller"
            )
        while True:
            removed = self._removed.value
            with self._lock:
                if self._closed:
                    raise self._closed_error("nothing can be put into it")
                if self._has_room(nbytes):
                    slot = Slot(self.device, self._pool, self._form, sources, self.what)
                    self._slots.append(slot)
                    self._nbytes += nbytes
                    self._added.advance()
                    break
            waiting.tick(self._removed, removed + 1, self._no_room)
        if not unchanged and any(isinstance(source, Reading) for source in sources):
            slot.copied.precede(max(waiting.left(), DEADLINE))
        return slot

    def _has_room(self, nbytes: int) -> bool:
        fits = self.memory_limit is None or self._nbytes + nbytes <= self.memory_limit
        return fits and len(self._slots) < self.capacity

    def _no_room(self) -> str:
        return (
            f"an item waits for room in {self!r}, which holds {len(self._slots)} of {self._nbytes} "
            "bytes, and nobody takes one; get it in another thread, or close the area"
        )

    def _no_item(self) -> str:
        return f"an item of {self!r} is waited for and nobody puts one; put one, or close the area"

    # --- taking

    def get(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Remove the oldest item, when there is one, and return its tensors.

        Dropping the tensors gives their memory back to the area. Raises HangError where no item
        comes in time, ClosedError where the area is closed and empty, also while this waits; and
        what was raised while the item was copied, which is removed by that.
        """
        return self._taken(0, timeout, remove=True)

    def peek(self, index: int = 0, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Return the tensors of item `index`, when there is one, and leave it; 0 is the oldest.

        Raises as `get` does, and UsageError for an index that no item can have.
        """
        if type(index) is not int or not 0 <= index < self.capacity:
            raise UsageError(f"{self!r} has no item {index!r}; 0 is the oldest")
        return self._taken(index, timeout, remove=False)

    def _taken(self, index: int, timeout: float | None, remove: bool) -> tuple[Tensor, ...]:
        if not observe.watching:
            return self._take(index, timeout, remove).tensors()
        with observe.span("get", "from a staging area", device=self.device.short):
            slot = self._take(index, timeout, remove)
            observe.got(slot)
        return slot.tensors()

    def _take(self, index: int, timeout: float | None, remove: bool) -> Slot:
        waiting = self._begin(timeout)
        readers = {self.device.stream("compute"), context.device().stream("compute")}
        while True:
            added = self._added.value
            with self._lock:
                slot = self._slots[index] if index < len(self._slots) else None
                if slot is None and self._closed:
                    raise self._closed_error("nothing is left in it")
            if slot is None:
                waiting.tick(self._added, added + 1, self._no_item)
                continue
            slot.await_copy(readers, waiting.left())
            with self._lock:
                if index < len(self._slots) and self._slots[index] is slot:  # still
                    slot.loan.readers |= readers
                    if remove:
                        self._slots.popleft()
                        self._nbytes -= slot.nbytes
                        self._removed.advance()
                    break
        if slot.failures:
            raise slot.failures[0]
        return slot

    # --- the area as a whole

    def size(self) -> int:
        """Return how many items there are now, the same from every thread."""
        return len(self._slots)

    def clear(self) -> None:
        """Drop all items; who waits for room gets it."""
        self._check_process()
        with self._lock:
            dropped = len(self._slots)
            self._slots.clear()
            self._nbytes = 0
            self._removed.advance(dropped)

    def close(self) -> None:
        """Let nothing be put any more; what is in the area can still be taken.

        Who waits for what cannot come any more gets a ClosedError. Closing twice is fine.
        """
        self._closed = True
        self._pool.close()
        self._added.lift()
        self._removed.lift()

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(map(str, self._form.dtypes[:4])) + ", …" * (len(self._form.dtypes) > 4)
        closed = ", closed" * self._closed
        return f"<StagingArea ({names}) on {self.device.short}, capacity {self.capacity}{closed}>"

    def _begin(self, timeout: float | None) -> Waiting:
        self._check_process()
        if timeout is None:
            return Waiting(*context.frame().strategy.patience)
        if not (isinstance(timeout, int | float) and timeout >= 0):
            raise UsageError(f"timeout is a number of seconds from 0 on, or None, not {timeout!r}")
        return Waiting(math.inf, timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                f"this process ({os.getpid()}) was forked from {self._pid} after {self!r} had "
                "been made, and what copies for it does not survive a fork; make one in the child"
            )

    def _closed_error(self, what: str) -> ClosedError:
        return ClosedError(f"{self!r} was closed, and {what} any more")
