"""A device whose streams do their work late: whenever a test lets one of them do its next piece.

It stands for a GPU: giving work takes no time, `get` and dropping a tensor block nobody, and the
order between streams is as bad as their events allow.
"""

from __future__ import annotations

import math
from collections import deque

from minidist.device import Event, Stream
from minidist.device.cpu import CpuDevice
from minidist.errors import HangError


class LateEvent(Event):
    def __init__(self, stream, position):
        self.stream, self.position = stream, position

    def done(self):
        return self.stream.finished >= self.position

    def wait(self, timeout=math.inf):
        while not self.done():
            if not self.stream.device.step(self.stream):
                raise HangError("nothing can go on")


class LateStream(Stream):
    def __init__(self, device, role):
        super().__init__(device, role)
        self.given = self.finished = 0
        self.queue = deque()

    def submit(self, work, *, brief=False):
        self.given += 1
        self.queue.append(work)

    def record(self):
        return LateEvent(self, self.given)

    def wait(self, event, timeout=math.inf):
        self.submit(event)

    def ready(self):
        """Whether its next piece of work can be done now."""
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, Event) or first.done()

    def step(self):
        work = self.queue.popleft()
        if not isinstance(work, Event):
            work()
        self.finished += 1


class LateDevice(CpuDevice):
    """`choose(ready streams)` says which of them does its next piece of work."""

    def __init__(self, choose=lambda streams: streams[0]):
        super().__init__(99, "cpu:99")
        self.choose = choose
        self.allocated = 0

    def allocate(self, shape, dtype):
        self.allocated += 1
        return super().allocate(shape, dtype)

    def _new_stream(self, role):
        return LateStream(self, role)

    def _end_stream(self, stream):
        pass

    def step(self, *first):
        """Let a stream do something, one of `first` if that can; say whether one could."""
        ready = [stream for stream in first if stream.ready()]
        ready = ready or [stream for stream in self._streams.values() if stream.ready()]
        if ready:
            self.choose(ready).step()
        return bool(ready)

    def finish(self):
        while self.step():
            pass
        assert not any(stream.queue for stream in self._streams.values()), "a stream waits for ever"
