"""Ranks: the launcher's side of its supervisors: who is here, what they say, how each has ended."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minidist.launch.output import Output
from minidist.launch.supervisor import DISMISSED, ENDED, ERR, HEAD, HERE, LAUNCH, OUT


@dataclass
class Rank:
    """One rank: its number, machine and process, and once it has ended, how and after how long.

    status: its exit status, or the negative number of the signal that has killed it; None while it
    runs. lost: the connection to its supervisor broke before that said how the rank has ended.
    """

    number: int
    host: str
    pid: int
    connection: socket.socket
    status: int | None = None
    seconds: float = 0.0
    lost: bool = False

    @property
    def ended(self) -> bool:
        return self.status is not None or self.lost

    @property
    def failed(self) -> bool:
        return self.lost or self.status not in (None, 0)

    @property
    def exit_status(self) -> int:
        """What a shell would give: 128 + n after signal n. With its supervisor it was killed."""
        if self.lost:
            return 128 + signal.SIGKILL
        status = self.status or 0
        return 128 - status if status < 0 else status

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host} (process {self.pid})"

    def how(self) -> str:
        """Return in words how it has ended."""
        if self.lost:
            return "is gone with its supervisor, which was killed or lost its connection"
        if self.status is not None and self.status < 0:
            try:
                name = signal.Signals(-self.status).name
            except ValueError:
                name = f"signal {-self.status}"
            hint = " (by a system short of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint} after {self.seconds:.1f} s"
        return f"has exited with status {self.status} after {self.seconds:.1f} s"


class Ranks:
    """The connections of all supervisors of one start.

    news: where a Rank is put when it comes, and when it has ended. local: all of them are on this
    machine, so nobody else is listened to; else towards: one of the others.
    """

    def __init__(
        self,
        count: int,
        news: queue.SimpleQueue[Any],
        output: Output,
        *,
        local: bool,
        towards: str | None = None,
    ) -> None:
        self.count = count
        self.all: dict[int, Rank] = {}
        self._news = news
        self._output = output
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1" if local else "", 0))
        port = self._listener.getsockname()[1]
        self._addresses = [f"{host}:{port}" for host in _own_addresses(local, towards)]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def environment(self) -> dict[str, str]:
        """What a supervisor needs in its environment to come here."""
        return {LAUNCH: " ".join([self._token, *self._addresses])}

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [number for number in range(self.count) if number not in self.all]

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in list(self.all.values()) if not rank.ended]

    def signal(self, number: int) -> None:
        """Send all ranks a signal; supervisors whose ranks have ended end themselves."""
        for rank in list(self.all.values()):
            with contextlib.suppress(OSError):
                rank.connection.sendall(bytes([number]))

    def dismiss(self) -> None:
        """Let the supervisors end whose ranks have; wait until all that they said is written."""
        self.signal(DISMISSED)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for rank in list(self.all.values()):
            if not rank.ended:
                with contextlib.suppress(OSError):
                    rank.connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(1.0)

    # --- threads: one that accepts, and one for each connection

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._listen, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _listen(self, connection: socket.socket) -> None:
        rank: Rank | None = None
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            connection.settimeout(10.0)  # who connects says at once who it is
            while (frame := _receive(connection)) is not None:
                kind, data = frame
                if rank is None:
                    rank = self._welcome(connection, kind, data)
                    connection.settimeout(None)
                elif kind in (OUT, ERR):
                    self._output.write(rank.number, data, to_errors=kind == ERR)
                elif kind == ENDED:
                    told = json.loads(data)
                    rank.seconds = float(told["seconds"])
                    rank.status = int(told["status"])
                    self._news.put(rank)
        if rank is not None and not rank.ended:
            rank.lost = True
            self._news.put(rank)

    def _welcome(self, connection: socket.socket, kind: bytes, data: bytes) -> Rank:
        told = json.loads(data) if kind == HERE and len(data) < 4096 else {}
        if not secrets.compare_digest(str(told["token"]), self._token):
            raise ValueError("a stranger")
        rank = Rank(int(told["rank"]), str(told["host"]), int(told["rank_pid"]), connection)
        if rank.number in self.all or not 0 <= rank.number < self.count:
            raise ValueError("no such rank is expected")
        self.all[rank.number] = rank
        self._news.put(rank)
        return rank


def _receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """Return the next kind and data, None at the end."""
    head = _exactly(connection, HEAD.size)
    if head is None:
        return None
    kind, length = HEAD.unpack(head)
    data = _exactly(connection, length)
    return None if data is None else (kind, data)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 16))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _own_addresses(local: bool, towards: str | None) -> Sequence[str]:
    """Return by what names supervisors may reach this machine; towards: another machine."""
    if local:
        return ["127.0.0.1"]
    found = []
    # Which of its addresses a machine uses towards another, without a packet being sent.
    for other in (towards, "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            if other is not None:
                probe.connect((other, 9))
                found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname(), "127.0.0.1"]))
