"""Trace: what every replica and stream did when, written to a file to look at.

    with md.trace("steps.html"):          # a page for any browser; "steps.json" is for Perfetto
        for images, labels in dataset:
            strategy.run(step, images, labels)

`timeline.py` hears it, `recording.py` is what was heard, `arrows.py` joins what made what possible,
`phases.py` says where the time went, and `words.py` says it in sentences. `chrome.py` and `page.py`
are the two kinds of files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import ModuleType

from minidist.errors import UsageError
from minidist.trace.files import check, write
from minidist.trace.phases import Phases, phases
from minidist.trace.recording import Recording
from minidist.trace.timeline import Timeline

__all__ = ["STEPS", "Phases", "Recording", "Timeline", "phases", "trace", "write"]

STEPS = 10  # how many a file holds unless more are asked for


@contextmanager
def trace(path: str | PathLike[str], *, steps: int = STEPS) -> Iterator[Timeline]:
    """Write what happens within to a file: the last `steps` steps, also where it fails.

    A name ending in .json gives Chrome's trace event format, one in .html a page. A step is a run
    with the input that was taken for it. Memory stays bounded: of each thread some 30,000 spans are
    kept, so of a large model's steps there may be fewer.
    Raises UsageError (a ValueError) for another ending and for steps below 1.
    """
    check(path)
    if steps < 1:
        raise UsageError(f"steps is how many steps are written, at least 1, not {steps!r}")
    timeline = Timeline()
    try:
        with timeline.attached():
            yield timeline
    finally:
        write(Path(path), timeline.recording().last(steps))


class _Callable(ModuleType):
    """A module that is called as its function of the same name: md.trace is both."""

    __call__ = staticmethod(trace)


sys.modules[__name__].__class__ = _Callable
