"""PMI: how MPI's processes find each other where no launcher of MPI's has started them.

MPICH asks whoever has started it, in lines of text over a socket (PMI-1): who am I, of how many;
`put` this for the others; wait until all have; `get` what another has put. An mpiexec answers that.
Where processes are started by hand, by torchrun or by srun without PMI, rank 0 starts a `Desk`:

    every rank   a Line to the desk                  "here is rank 2"   …   "all are here"
    every rank   MPI_Init, with PMI_PORT             put, wait, get
    every rank   MPI_Finalize, then over its Line    "bye"; rank 0 ends after all others

A line that breaks without a "bye" is a process that has died, of which the desk tells all others;
and if the desk is gone itself, so is rank 0. Who hears so ends, as under an mpiexec. line.py is the
other end.

The desk is a process of its own, for in that of rank 0 nothing else can run while MPI starts. This
file is its program, and imports only what comes with Python.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Sequence

Address = tuple[str, int]

FORGOTTEN = 60.0  # seconds after which a desk ends to which not even rank 0 has come
SILENCE = 10  # seconds after which a machine that has vanished from the network counts as dead


class Desk:
    """Where the processes say that they are here, and where MPI puts and gets.

    names: what the ranks are called.
    """

    def __init__(self, listener: socket.socket, names: Sequence[str]) -> None:
        self._listener, self._names, self._size = listener, names, len(names)
        self._changed = threading.Condition()
        self._here: dict[int, Lines] = {}
        self._gone: set[int] = set()  # have said goodbye, or are dead
        self._open = 0  # connections: MPI's own ends last, when its process does
        self._died = False
        self._space = f"minidist_{os.getpid()}_{os.urandom(8).hex()}"  # MPI names memory after it
        self._values: dict[str, str] = {}
        self._at_barrier: list[Lines] = []

    def serve(self) -> None:
        """Return when all that have come are gone again, or nobody comes."""
        threading.Thread(target=self._accept, daemon=True).start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._here, FORGOTTEN):
                return
            self._changed.wait_for(lambda: self._here and not self._open)

    def _missing(self) -> str:
        return ", ".join(self._names[i] for i in range(self._size) if i not in self._here)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            keep_alive(connection)
            threading.Thread(target=self._serve, args=(Lines(connection),), daemon=True).start()

    def _serve(self, lines: Lines) -> None:
        with self._changed:
            self._open += 1
        rank = self._serve_until_closed(lines)
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
            if rank is not None and rank not in self._gone:
                self._tell_of_death(rank)
            if self._open == 2 and self._gone.issuperset(range(self._size)):
                self._tell("cmd=others_have_ended", [0])

    def _serve_until_closed(self, lines: Lines) -> int | None:
        """Answer what comes; return the rank whose line this was, None for one of MPI's."""
        rank: int | None = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            while line := lines.next():
                command = line["cmd"]
                if command == "here":
                    rank = self._welcome(lines, int(line["rank"]), int(line["size"]))
                elif command == "missing":
                    with self._changed:
                        lines.say(f"cmd=missing why={self._missing()}")
                elif command == "bye" and rank is not None:
                    with self._changed:
                        self._gone.add(rank)
                else:
                    self._answer(lines, command, line)
        return rank

    def _welcome(self, lines: Lines, rank: int, size: int) -> int | None:
        """Note that a rank is here; return it, or None where it is refused."""
        with self._changed:
            if size != self._size:
                why = f"it was told of {size} processes, and {self._names[0]} of {self._size}"
            elif rank in self._here:
                why = f"another process is {self._names[rank]} already"
            else:
                self._here[rank] = lines
                self._changed.notify_all()
                if len(self._here) == self._size:
                    self._tell("cmd=all_here", self._here)
                return rank
        lines.say(f"cmd=refused why={why}")
        return None

    def _tell_of_death(self, rank: int) -> None:
        self._gone.add(rank)
        if not self._died:  # of the first: the others die of it
            self._died = True
            others = set(self._here) - self._gone
            self._tell(f"cmd=died why={self._names[rank]} has died or left the others", others)

    def _tell(self, line: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._here[rank].say(line)

    def _answer(self, lines: Lines, command: str, line: dict[str, str]) -> None:
        """Answer MPI, as its PMI-1 has it."""
        if command == "initack":
            lines.say("cmd=initack rc=0")
            lines.say(f"cmd=set size={self._size}")
            lines.say(f"cmd=set rank={int(line['pmiid'])}")
            lines.say("cmd=set debug=0")
        elif command == "init":
            lines.say("cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")
        elif command == "get_maxes":
            lines.say("cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0")
        elif command == "get_appnum":
            lines.say("cmd=appnum appnum=0 rc=0")
        elif command == "get_my_kvsname":
            lines.say(f"cmd=my_kvsname kvsname={self._space} rc=0")
        elif command == "get_universe_size":
            lines.say(f"cmd=universe_size size={self._size} rc=0")
        elif command == "put":
            self._values[line["key"]] = line["value"]
            lines.say("cmd=put_result rc=0 msg=success")
        elif command == "get":
            value = self._values.get(line["key"])
            found = (
                "rc=-1 msg=key_not_found value=unknown"
                if value is None
                else (f"rc=0 msg=success value={value}")
            )
            lines.say(f"cmd=get_result {found}")
        elif command == "barrier_in":
            with self._changed:
                self._at_barrier.append(lines)
                if len(self._at_barrier) == self._size:
                    for each in self._at_barrier:
                        with contextlib.suppress(OSError):
                            each.say("cmd=barrier_out rc=0")
                    self._at_barrier = []
        elif command == "finalize":
            lines.say("cmd=finalize_ack rc=0")


class Lines:
    """Lines of `name=value` over a socket, the last value of which may have spaces."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        with self._lock:
            self._socket.sendall(line.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        self._socket.close()

    def next(self) -> dict[str, str]:
        """Return the next line, empty where there is none any more; or raise TimeoutError."""
        while b"\n" not in self._rest:
            more = self._socket.recv(4096)
            if not more:
                self._socket.close()
                return {}
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        text = line.decode("utf-8", "replace")
        found: dict[str, str] = {}
        while text:
            name, _, text = text.lstrip().partition("=")
            if name in ("value", "why"):  # the last ones, to the end of the line
                value, text = text, ""
            else:
                value, _, text = text.partition(" ")
            found[name] = value
        return found


def keep_alive(connection: socket.socket) -> None:
    """Let the system notice a machine that is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", SILENCE // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", SILENCE // 2),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


if __name__ == "__main__":
    os.setsid()  # a terminal's Ctrl-C is for the ranks, and they tell of their ends
    Desk(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).serve()
