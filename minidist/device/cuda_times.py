"""Moments: when a GPU's stream came to a place, by the GPU's own clock.

A moment is recorded in a stream like an event, and costs nobody a wait. What time it was then, by
the host's clock, is asked much later: how long before now it was, where now is a moment for which
the host waits and looks at both clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cupy

if TYPE_CHECKING:
    from minidist.device.cuda_stream import CudaStream


class Moment:
    """When `stream` came here."""

    __slots__ = ("raw", "stream")

    def __init__(self, stream: CudaStream) -> None:
        self.stream = stream
        try:
            self.raw: Any = stream.device.timers.popleft()
        except IndexError:
            with stream.device.gpu:
                self.raw = cupy.cuda.Event(disable_timing=False)
        self.raw.record(stream.raw)

    def __del__(self) -> None:
        if hasattr(self, "raw"):
            self.stream.device.timers.append(self.raw)


def clock(stream: CudaStream) -> Callable[[Moment], int]:
    """Return what says when a moment of this stream was, in `time.perf_counter_ns`.

    The stream is waited for. CUDA counts milliseconds in 24 bits, so what was a second ago is known
    to a tenth of a microsecond.
    """
    stream.synchronize()
    now = Moment(stream)
    while not now.raw.done:
        time.sleep(0)
    host = time.perf_counter_ns()
    return lambda moment: host - round(1e6 * cupy.cuda.get_elapsed_time(moment.raw, now.raw))
