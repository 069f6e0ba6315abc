"""The end of a rank that fails: its traceback bears its name, and then the whole job ends.

A rank that went on alone, or waited for the others as MPI's end does, would leave them waiting.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, NoReturn, Protocol

from minidist.errors import PeerError

# Seconds that a rank, which fails because another has, gives that one to say why and end the job.
GRACE = 5.0
STATUS = 1  # of a process that an exception has ended, as always in Python
INTERRUPTED = 130
# Where the launcher watches over this process it ends the others, and names this one.
LAUNCHER = "MINIDIST_LAUNCH"


class Job(Protocol):
    """What ends the processes of all ranks, or only tells them that this one fails."""

    failing: bool

    def abort(self, status: int) -> None: ...

    def desert(self) -> None: ...


class Ending:
    """Python's way to end on an exception, for one of several ranks.

    name: who this is, as "worker:1"; it may be told better later.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.name = name
        self._job = job
        self._pid = os.getpid()
        self._hook, self._thread_hook = sys.excepthook, threading.excepthook
        sys.excepthook = self.end
        threading.excepthook = self.tell_of_thread
        sys.exit = self.exit

    def exit(self, status: Any = None) -> NoReturn:
        """Do as sys.exit does, and note whether this process fails: exit hooks are not told."""
        self._job.failing = status not in (None, 0)
        raise SystemExit(status)

    def end(
        self,
        kind: type[BaseException],
        failure: BaseException,
        where: TracebackType | None,
    ) -> None:
        """Print the traceback with the rank's name, and end the job; does not return.

        In a child that was forked off this process, and where somebody types at a prompt, it only
        does what was done before.
        """
        if os.getpid() != self._pid or hasattr(sys, "ps1") or sys.flags.interactive:
            self._hook(kind, failure, where)
            return
        try:
            if issubclass(kind, KeyboardInterrupt):
                _print(f"{self.name} was interrupted\n")
            elif self._hook is sys.__excepthook__:
                _print(self._named(traceback.format_exception(kind, failure, where)))
            else:
                _print(f"{self.name} has failed:\n")
                self._hook(kind, failure, where)
            if issubclass(kind, PeerError):
                self._job.desert()
                threading.Event().wait(GRACE)
        finally:
            self._leave(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else STATUS)

    def tell_of_thread(self, args: threading.ExceptHookArgs) -> None:
        """Say in which rank a thread has failed. As ever in Python, that ends only the thread."""
        if os.getpid() == self._pid and not isinstance(args.exc_value, SystemExit):
            _print(f"{self.name}: a thread has failed\n")
        self._thread_hook(args)

    def _named(self, parts: list[str]) -> str:
        """Return a traceback whose lines begin with the name, for they mix with other ranks'."""
        lines = "".join(parts).splitlines()
        return "".join(f"[{self.name}] {line}\n" for line in lines)

    def _leave(self, status: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if LAUNCHER not in os.environ:
            with contextlib.suppress(Exception):
                self._job.abort(status)
        os._exit(status)


def _print(text: str) -> None:
    """Write to standard error at once, so that no other rank's line comes between."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
