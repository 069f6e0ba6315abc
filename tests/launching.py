"""Run the launcher as a user does, and see what becomes of the processes below it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import Any

LIMIT = 60  # seconds for anything here, on a machine that is busy with other things
COMMAND = [sys.executable, "-m", "minidist.launch"]
RANK = "int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])"
# What rank programs begin with; they need not know MPI to be started by mpiexec.
BEGIN = f"import os, signal, sys; rank = {RANK}; "


class Launched:
    """A launcher that runs, and what its ranks print line by line."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        self.lines: list[str] = []

    def read(self, count: int) -> list[str]:
        """Return the next lines that the ranks print, once there are so many."""
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline().rstrip("\n") for _ in range(count)]
        return self.lines

    def end(self) -> tuple[int, str, str]:
        """Wait for the launcher's end; return its status, what else was printed, and its words."""
        try:
            out, errors = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()  # which ends all below it
            self.process.communicate()
            raise
        return self.process.returncode, out, errors


def launch(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run the launcher to its end; return its status, the ranks' output, and errors."""
    return Launched(*arguments, **variables).end()


def opened(pids: Any) -> list[int]:
    """Return descriptors by which the ends of processes that still run can be waited for."""
    found = []
    for pid in map(int, pids):
        try:
            found.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    return found


def all_end(descriptors: list[int]) -> bool:
    """Wait until all of these processes have ended; say whether they have."""
    try:
        return all(select.select([fd], [], [], LIMIT)[0] for fd in descriptors)
    finally:
        for fd in descriptors:
            os.close(fd)


def is_gone(pid: int | str) -> bool:
    """Return whether a process has ended; a dead one that nobody has buried yet counts."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
