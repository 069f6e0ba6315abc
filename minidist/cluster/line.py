"""Line: a process's connection to where all of them find each other, and hear of deaths."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from minidist.cluster import pmi
from minidist.cluster.pmi import Address, Lines, keep_alive, text
from minidist.errors import ClusterError
from minidist.patience import DEADLINE, REPORT_AFTER

log = logging.getLogger("minidist")

SPEAKERS = ("MPICH", "MVAPICH", "Intel MPI")  # as mpi4py calls those that speak PMI-1
RETRY = 0.1  # seconds between two tries to reach a desk that is not there yet
LEAVE = 10.0  # seconds that rank 0 waits at the end for the others' "bye"


class Line:
    """This process's connection to the desk, which rank 0 has in its own process.

    Made, it has waited until all processes are here.
    Raises ClusterError where one does not come, or two say that they are the same.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        names: Sequence[str],
        report_after: float = REPORT_AFTER,
        deadline: float = DEADLINE,
    ) -> None:
        self._address, self._rank, self._names = address, rank, names
        self._me = names[rank]
        self._over, self._others_ended = threading.Event(), threading.Event()
        self._has_ended: Callable[[], bool] = lambda: False
        self._since = time.monotonic()
        self._report_after, self._deadline = report_after, deadline
        self._desk = _open_desk(address, names) if rank == 0 else None
        self._socket: socket.socket | None = None
        try:
            self._socket = self._reach()
            keep_alive(self._socket)
            self._lines = Lines(self._socket)
            self._lines.say(f"cmd=here rank={rank} size={len(names)}")
            self._wait_for_all(self._socket)
        except BaseException:
            if self._socket is not None:
                self._socket.close()
            if self._desk is not None:
                self._desk.kill()
                self._desk.wait()
            raise
        threading.Thread(target=self._watch, name="minidist-line", daemon=True).start()

    def lead_mpi(self, mpi: Any) -> None:
        """Lead MPI to the desk; `mpi` is its module, not started yet.

        Raises ClusterError where it is an MPI that speaks otherwise.
        """
        vendor, _ = mpi.get_vendor()
        if vendor not in SPEAKERS:
            raise ClusterError(
                f"{vendor} starts only under its own mpiexec, and these processes were started "
                f"without; {', '.join(SPEAKERS)} can: pip install mpich brings the first"
            )
        os.environ["PMI_PORT"] = text(self._address)
        os.environ["PMI_ID"] = str(self._rank)

    def follow(self, close: Callable[[], None], has_ended: Callable[[], bool]) -> None:
        """MPI has started: what this process starts are no ranks. Be closed after MPI, at exit.

        close: what ends MPI at exit; has_ended: whether it has.
        """
        self._has_ended = has_ended
        for name in ("PMI_PORT", "PMI_ID"):
            os.environ.pop(name, None)
        atexit.unregister(close)
        atexit.register(self.close)
        atexit.register(close)  # the last one is called first

    def close(self) -> None:
        """Say that MPI has ended here. Rank 0 waits for the others' ends, for a while.

        For MPI asks the desk once more when its process ends, and the desk may end with rank 0.
        """
        if self._has_ended():
            self._over.set()
            with contextlib.suppress(OSError):
                self._lines.say("cmd=bye")
            if self._rank == 0:
                self._others_ended.wait(LEAVE)

    def _reach(self) -> socket.socket:
        while True:
            try:
                # One try may hang as long as the network likes, where an address leads nowhere.
                return socket.create_connection(self._address, min(self._deadline, 5.0))
            except OSError as cause:
                self._tick(
                    f"{self._me} cannot reach {self._names[0]} at {text(self._address)} "
                    f"({cause.strerror or cause}); is it started, and does that address lead to it?"
                )
                time.sleep(RETRY)

    def _wait_for_all(self, connection: socket.socket) -> None:
        while True:
            connection.settimeout(max(RETRY, min(self._report_after, self._deadline)))
            try:
                line = self._lines.next()
            except TimeoutError:
                self._lines.say("cmd=missing")
                continue
            if line.get("cmd") == "all_here":
                connection.settimeout(None)
                return
            if line.get("cmd") == "missing":
                where = text(self._address)
                self._tick(f"{self._me} waits at {where} for {line['why']}, not started yet")
                continue
            why = line.get("why") or f"{self._names[0]} has ended while the processes started"
            raise ClusterError(f"{self._me} cannot take part: {why}")

    def _tick(self, what: str) -> None:
        """Report or give up, if it is time."""
        waited = time.monotonic() - self._since
        if waited >= self._deadline:
            raise ClusterError(f"after {waited:.0f} s {what}")
        if waited >= self._report_after:
            self._report_after = self._deadline
            log.warning("after %.0f s (the deadline is %g s) %s", waited, self._deadline, what)

    def _watch(self) -> None:
        try:
            line = self._lines.next()
        except OSError:
            line = {}
        self._others_ended.set()
        if self._over.is_set():
            return
        who = line.get("why") or f"{self._names[0]} has died"
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(f"minidist: {who}, so {self._me} ends\n")
            sys.stderr.flush()
        os._exit(1)


def _open_desk(address: Address, names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the desk's process, which ends when all lines to it have."""
    loopback = address[0] == "localhost" or address[0].startswith("127.")
    try:
        listener = socket.create_server((address[0] if loopback else "", address[1]))
    except OSError as cause:
        raise ClusterError(
            f"{names[0]} cannot listen at {text(address)}, where the others look for it: "
            f"{cause.strerror or cause}. Choose another port"
        ) from cause
    with listener:
        command = [sys.executable, "-I", "-S", pmi.__file__, str(listener.fileno()), *names]
        return subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
