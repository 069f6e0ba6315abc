"""Errand: work that a stream does for one step, and who waits for it gets what it has raised.

Nobody else does: a stream goes on to what others have given it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from minidist.device import Event, Stream
from minidist.patience import DEADLINE


class Errand:
    """Pieces of work for one stream, in order; after one that has failed the rest is left out."""

    def __init__(
        self,
        stream: Stream,
        patience: float = DEADLINE,
        tell: Callable[[BaseException], None] = lambda failure: None,
    ) -> None:
        """patience: seconds to wait for it. tell: is told at once what the work has raised."""
        self._stream = stream
        self._patience = patience
        self._tell = tell
        self.event: Event | None = None  # of having done all so far
        self._failure: BaseException | None = None

    def add(self, work: Callable[[], object]) -> None:
        """Let the stream do this too."""

        def do() -> None:
            if self._failure is None:
                try:
                    work()
                except BaseException as failure:
                    self._failure = failure
                    self._tell(failure)

        self._stream.submit(do)
        self.event = self._stream.record()

    def end(self) -> None:
        """Wait until all is done; nobody will ask any more what has become of it."""
        if self.event is not None:
            with contextlib.suppress(Exception):
                self.event.wait(self._patience)

    def wait(self) -> None:
        """Let it precede what the caller does next; raises what the work has raised, and HangError.

        A GPU goes on by itself. The caller waits for the threads of other streams.
        """
        if self.event is not None:
            self.event.precede(self._patience)
        if self._failure is not None:
            raise self._failure
