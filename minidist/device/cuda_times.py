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

from minidist.device.base import hang
from minidist.patience import DEADLINE

if TYPE_CHECKING:
    from minidist.device.cuda_stream import CudaStream

NOT_YET = 600  # cudaErrorNotReady, of driver_types.h


def happened(raw: Any, stream: CudaStream) -> bool:
    """Return whether a CUDA event, recorded in a stream, has happened.

    Raises CUDA's own error where the GPU has failed, which CuPy's `Event.done` never tells.
    """
    runtime = cupy.cuda.runtime
    status = runtime.eventQuery(raw.ptr)
    if status in (0, NOT_YET):
        return bool(status == 0)
    failure = runtime.CUDARuntimeError(status)
    failure.add_note(
        f"{stream.device.short} failed in something that it was given before, and does nothing "
        "more in this process; with CUDA_LAUNCH_BLOCKING=1 the error comes from where it was given"
    )
    raise failure


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


def clock(stream: CudaStream, timeout: float = DEADLINE) -> Callable[[Moment], int]:
    """Return what says when a moment of this stream was, in `time.perf_counter_ns`.

    The stream is waited for; raises HangError after `timeout` seconds. CUDA counts milliseconds in
    24 bits, so what was a second ago is known to a tenth of a microsecond.
    """
    stream.synchronize(timeout)
    now, end = Moment(stream), time.monotonic() + timeout
    while not happened(now.raw, stream):
        if time.monotonic() > end:
            raise hang(stream, timeout, f"a moment at the end of {stream!r}")
        time.sleep(0)
    host = time.perf_counter_ns()
    return lambda moment: host - round(1e6 * cupy.cuda.get_elapsed_time(moment.raw, now.raw))
