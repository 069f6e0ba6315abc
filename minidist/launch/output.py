"""Output: the lines of all ranks, each of them whole, to the launcher's own output."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class Output:
    """Where lines go. tag: each begins with its rank, as "[2] ".

    broken: called once, with what has gone wrong, when the output takes no more.
    """

    def __init__(self, tag: bool, broken: Callable[[OSError], None]) -> None:
        self._tag = tag
        self._broken: Callable[[OSError], None] | None = broken
        self._lock = threading.Lock()

    def write(self, rank: int, lines: bytes, to_errors: bool) -> None:
        """Write whole lines of one rank."""
        if self._tag:
            start = f"[{rank}] ".encode()
            lines = b"".join(start + line + b"\n" for line in lines.split(b"\n")[:-1])
        stream = sys.stderr if to_errors else sys.stdout
        with self._lock:
            if self._broken is None:
                return
            try:
                stream.buffer.write(lines)
                stream.buffer.flush()
            except OSError as failure:
                broken, self._broken = self._broken, None
                broken(failure)

    def say(self, sentence: str) -> None:
        """Write a line of the launcher's own to standard error."""
        with self._lock:
            try:
                print(f"minidist.launch: {sentence}", file=sys.stderr, flush=True)
            except OSError:
                self._broken = None
