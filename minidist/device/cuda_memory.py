"""Memory of a GPU: blocks that know who has touched them, and pools that never give any back.

CuPy's pool has an arena for each stream: a block that is dropped is used again by the stream it was
made on, which does so after all that it was given before. What another stream was given with the
block is not before; so the block is held until that stream is done with it. In the steady state no
step asks CUDA for memory, which would wait for the whole GPU: `made` counts how often it was.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import cupy
import numpy as np

from minidist import observe
from minidist.device.base import Array, Device
from minidist.device.cuda_stream import CudaEvent, CudaStream
from minidist.device.cuda_times import happened

if TYPE_CHECKING:
    from minidist.device.cuda import CudaDevice

Held = tuple[Any, CudaStream, list[CudaEvent]]  # memory, whose arena's, and until when

# Pinned buffers of one size that are under way before their oldest is waited for: so many, and of
# small ones, such as the tables of addresses that kernels get, as many as are so many bytes, up to
# a number that leaves the GPU enough to do while the host waits for the oldest.
IN_FLIGHT = 4
IN_FLIGHT_BYTES = 4 << 20
IN_FLIGHT_SMALL = 32


class Block(cupy.cuda.memory.BaseMemory):  # type: ignore[misc]
    """What was allocated at once; all views of an array share it. `on`: its device."""

    def __init__(self, pointer: Any, stream: CudaStream, memory: Memory) -> None:
        self.ptr, self.size, self.device_id = pointer.ptr, pointer.mem.size, pointer.device_id
        self.on = memory.device
        self._pointer = pointer
        self._memory = memory
        self._home = stream
        self._writer, self._written = stream, stream.next
        self._readers: dict[CudaStream, int] = {}
        self._lock = threading.Lock()

    @property
    def block(self) -> Block:
        return self

    def read(self, stream: CudaStream) -> None:
        """Let what a stream is being given see what was written last."""
        with self._lock:
            stream.follow(self._writer, self._written)
            self._readers[stream] = stream.next

    def write(self, stream: CudaStream) -> None:
        """Let what a stream is being given write, after all that reads or writes now."""
        with self._lock:
            stream.follow(self._writer, self._written)
            for reader, position in self._readers.items():
                stream.follow(reader, position)
            self._writer, self._written = stream, stream.next
            self._readers.clear()

    def __del__(self) -> None:
        # Called anywhere, by any thread: it must take no lock.
        touched = [(self._writer, self._written), *self._readers.items()]
        home = self._home
        self._memory.drop(
            self._pointer,
            home,
            [
                stream.after(position)
                for stream, position in touched
                if stream is not home and home.seen.get(stream, 0) < position
            ],
        )


class Tied(cupy.cuda.memory.BaseMemory):  # type: ignore[misc]
    """A part of a block, and somebody who is kept alive by it and by every view of it."""

    def __init__(self, array: Array, owner: object) -> None:
        self.ptr, self.size = array.data.ptr, array.nbytes
        self.device_id = array.data.device_id
        self.block = array.data.mem.block
        self._array = array
        self._owner = owner


class Memory:
    """The memory that one device uses of its GPU."""

    _all: ClassVar[list[weakref.ref[Memory]]] = []  # shares of a GPU make room for each other

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        Memory._all.append(weakref.ref(self))
        self.made = 0
        self._pool = cupy.cuda.MemoryPool(self._make)
        # By the stream that it is held for, which is done with the oldest first. Nothing is ever
        # taken out of the dictionary: `drop` may be called in the middle of anything.
        self._held: dict[tuple[Device, str], deque[Held]] = {}

    def allocate(self, size: int) -> Any:
        """Return a pointer to fresh memory, for the stream that the thread gives work to.

        Raises CuPy's OutOfMemoryError.
        """
        self._let_go()
        stream = self.device.stream_here()
        try:
            pointer = self._pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            for each in list(Memory._all):
                memory = each()
                if memory is not None and memory.device.index == self.device.index:
                    memory.reclaim()
            pointer = self._pool.malloc(size)
        block = Block(pointer, stream, self)
        if observe.watching:
            observe.allocated(block, stream)
        return cupy.cuda.MemoryPointer(block, 0)

    def _make(self, size: int) -> Any:
        self.made += 1
        memory = cupy.cuda.Memory(size)
        if observe.watching:
            observe.mapped(memory)
        return cupy.cuda.MemoryPointer(memory, 0)

    def drop(self, pointer: Any, home: CudaStream, events: list[CudaEvent]) -> None:
        """Give memory back to its stream's arena, at once or when the events are done."""
        if events:
            self._queue(events[0]).append((pointer, home, events))

    def _queue(self, event: CudaEvent) -> deque[Held]:
        return self._held.setdefault((event.stream.device, event.stream.role), deque())

    def _let_go(self) -> list[CudaEvent]:
        """Drop what no stream uses any more; return what the rest waits for, each queue's first."""
        first = []
        for queue in self._held.copy().values():
            while queue:
                try:
                    held = queue.popleft()
                except IndexError:  # another thread was faster
                    break
                _, home, events = held
                late = next((e for e in events if not happened(e.raw, e.stream)), None)
                if late is not None and self._queue(late) is queue:
                    queue.appendleft(held)
                    first.append(late)
                    break
                if late is not None:
                    self._queue(late).append(held)
                elif observe.watching:
                    for event in events:
                        observe.followed(home, event)
        return first

    def reclaim(self) -> None:
        """Free what nobody holds, and wait for the streams that still use some of it."""
        while late := self._let_go():
            for event in late:
                event.wait()
        self.clear()

    def clear(self) -> None:
        """Free what nobody holds."""
        self._let_go()
        with self.device.gpu:
            self._pool.free_all_blocks()


class Pinned:
    """Buffers in the host's memory that a GPU reads and writes by itself, while threads go on.

    They come in four sizes for each power of two and are never freed: that would wait for the GPU.
    """

    def __init__(self) -> None:
        self.made = 0
        self._free: dict[int, deque[tuple[np.ndarray[Any, Any], CudaEvent]]] = {}

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return a buffer of at least so many bytes, that no stream uses any more."""
        grain = max(512, 1 << max(0, nbytes.bit_length() - 3))
        size = max(-(-nbytes // grain), 1) * grain
        waiting = self._free.setdefault(size, deque())
        try:
            buffer, event = waiting.popleft()
        except IndexError:
            return self._make(size)
        if not event.done():
            most = min(IN_FLIGHT_SMALL, IN_FLIGHT_BYTES // size)
            if len(waiting) + 1 < max(IN_FLIGHT, most):
                waiting.appendleft((buffer, event))
                return self._make(size)
            event.wait()
        if observe.watching:
            observe.leased(buffer)
        return buffer

    def give_back(self, buffer: np.ndarray[Any, Any], after: CudaEvent) -> None:
        if observe.watching:
            observe.given_back(buffer, [after], False)
        self._free[buffer.size].append((buffer, after))

    def _make(self, size: int) -> np.ndarray[Any, Any]:
        self.made += 1
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
