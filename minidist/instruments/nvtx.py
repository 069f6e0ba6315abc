"""NVTX: all that is told, as ranges that NVIDIA's profilers show beside what GPUs do.

    nsys profile python train.py                     # a profiler asks for it by itself
    with md.nvtx():                                  # or the program says what it wants
        strategy.run(step, batch)

A range is pushed where a span begins or a GPU's stream is given a piece of work, and popped where
that ends, on the thread that does it. So ranges nest as the spans of a timeline do, and a kernel's
launch lies in that of its verb.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from minidist import observe
from minidist.errors import UsageError


class Ranges(observe.Observer):
    """Pushes and pops ranges, through CuPy. Raises UsageError where that cannot be imported."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as failure:
            raise UsageError(
                f"NVTX ranges go through CuPy, which cannot be imported ({failure}); pip install "
                "'minidist[cuda12]', or 'minidist[cuda13]' for CUDA 13"
            ) from failure
        self._push = cupy.cuda.nvtx.RangePush
        self._pop = cupy.cuda.nvtx.RangePop

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> None:
        self._push(f"{kind}: {name}")

    def end(self, token: None) -> None:
        self._pop()

    def giving(self, stream: Any, what: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        self._push(f"{what} ({stream.device.short} {stream.role})")

    def given(self, token: None) -> None:
        self._pop()


def begin() -> None:
    """Push ranges from now on, if there is CuPy: without it no GPU is used."""
    with suppress(UsageError):
        observe.attach(Ranges())


def nvtx() -> AbstractContextManager[None]:
    """Return a with statement's way to push ranges, in all threads.

    Raises UsageError where CuPy cannot be imported.
    """
    return observe.attached(Ranges())
