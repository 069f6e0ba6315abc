"""Rows as they come, with a bar under them where the output is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

REDRAW_SECONDS = 0.1


class Progress:
    """Print rows and show how many of `total` steps are done; a context manager.

    On a stream that is no terminal only the rows appear, a line each, and rich is not imported.
    The bar is drawn by the caller of `update`, never by a thread, which would disturb the timing.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stdout if stream is None else stream
        self._bar: Bar | None = None
        self._drawn = 0.0

    def start(self) -> None:
        """Show the bar, on a terminal."""
        if not self._stream.isatty():
            return
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TimeRemainingColumn(),
            console=Console(file=self._stream),
            auto_refresh=False,
            transient=True,
        )
        self._bar.add_task("", total=self._total)
        self._bar.start()

    def update(self, step: int) -> None:
        """Say that `step` steps are done."""
        if self._bar is None:
            return
        now = time.monotonic()
        draw = now - self._drawn >= REDRAW_SECONDS or step == self._total
        self._bar.update(self._bar.task_ids[0], completed=step, refresh=draw)
        if draw:
            self._drawn = now

    def row(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            from rich.segment import Segment, Segments

            # As text, rich would turn its tabs into spaces.
            self._bar.console.print(Segments([Segment(text)], new_lines=True), soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away; later rows are plain lines."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
