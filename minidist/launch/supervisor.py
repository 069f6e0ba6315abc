"""Supervisor: the parent of one rank, under mpiexec. Ends with the launcher, and the rank with it.

mpiexec starts this file once for each rank, and this starts the rank's program. Over a socket the
launcher gets every whole line that the rank prints, and how it has ended; and sends the numbers of
signals for it. Whatever dies, what is below it dies too:

    launcher ── mpiexec ── … ── supervisor ── rank ── what the rank has started
        └──────── socket ─────────────┘

If the launcher is gone, the socket says so and the rank is killed. If the supervisor is, the system
kills the rank. If the rank is, the supervisor kills what it has left behind.

It is run as a file by a bare Python, and imports only what comes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import NoReturn

LAUNCH = "MINIDIST_LAUNCH"  # the launcher's token and addresses, as "token host:port host:port"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")

# What a supervisor sends: a kind, the length of what follows, and that.
HEAD = struct.Struct("!cI")
HERE, OUT, ERR, ENDED = b"H", b"O", b"E", b"X"
DISMISSED = 0  # what it is sent besides signals: end, when the rank has

REACH = 10.0  # seconds to reach the launcher at one of its addresses
DISMISSAL = 60.0  # seconds that a supervisor, whose rank has failed, waits to be told to end
LINE = 1 << 16  # bytes after which a line is no longer waited for to end
AHEAD = 1 << 20  # bytes that may wait to be sent, before the rank's output is not read any more
FORGOTTEN = ("/dev/shm/mpich", "/dev/shm/sm_segment", "/dev/shm/vader_segment")

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Ask Linux for something about this process; other systems do without."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int, number: int) -> None:
    """Let the system send this process a signal when its parent, just now `parent`, has died."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Be the new parent of all below this process whose own parents die."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_all_below() -> None:
    """Kill everything that this process has started, directly or not, and that still runs.

    Below who has adopted orphans nothing escapes. Done again until there is nothing, because what
    is killed may just have started something.
    """
    for _ in range(100):
        below = _below(os.getpid())
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not below:
            return
        time.sleep(0.01)


def _below(ancestor: int) -> list[int]:
    """Return the processes below one, of those that are not dead already."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
    found: list[int] = []
    for pid in parents:
        up, seen = parents[pid], {pid}
        while up in parents and up != ancestor and up not in seen:
            seen.add(up)
            up = parents[up]
        if up == ancestor:
            found.append(pid)
    return found


class Lines:
    """What a rank writes to one of its outputs, handed on in whole lines."""

    def __init__(self, kind: bytes) -> None:
        self.kind = kind
        self._rest = b""

    def add(self, data: bytes) -> bytes:
        """Return what of the output has become whole lines."""
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > LINE:
            return whole + newline + self.end()
        return whole + newline

    def end(self) -> bytes:
        """Return the last line, which has no end."""
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


class Supervisor:
    """One rank's parent: a loop over the launcher's socket, the rank's outputs, and signals."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection
        self._outgoing = bytearray()
        self._started = time.monotonic()
        self._status: int | None = None  # of the rank, negative for a signal; None while it runs
        self._dismissed = False
        self._shared: set[str] = set()  # memory that the rank shares with others of its machine
        self._pid = 0
        self._selector = selectors.DefaultSelector()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._woken, waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: self._pass_on(number))

    def run(self, command: list[str]) -> int:
        """Run the rank to its end; return its exit status, 128 + n after signal n."""
        outputs = self._start(command)
        self._say(HERE, {**_who(), "rank_pid": self._pid})
        deadline: float | None = None
        while not (self._status is not None and (self._dismissed or self._status == 0)):
            if self._status is not None and deadline is None:
                deadline = time.monotonic() + DISMISSAL
            if deadline is not None and time.monotonic() > deadline:
                break
            self._read_only_if_sent(outputs)
            for key, events in self._selector.select(1.0):
                if key.fileobj is self._connection:
                    self._talk(events)
                elif key.fileobj == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                else:
                    self._read(int(key.fd), outputs)
            if self._reap():
                self._bury(outputs)
        self._send_all()
        assert self._status is not None or deadline is not None
        status = self._status or 0
        return 128 - status if status < 0 else status

    def _start(self, command: list[str]) -> dict[int, Lines]:
        (out, rank_out), (err, rank_err) = os.pipe(), os.pipe()
        me = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (*PASSED_ON, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(rank_out, 1)
            os.dup2(rank_err, 2)
            die_with_parent(me, signal.SIGKILL)
            _become(command)
        os.close(rank_out)
        os.close(rank_err)
        outputs = {out: Lines(OUT), err: Lines(ERR)}
        for fd in outputs:
            os.set_blocking(fd, False)
        return outputs

    # --- the rank

    def _pass_on(self, number: int) -> None:
        """Send the rank a signal."""
        if self._status is None:
            self._note_shared()
            with contextlib.suppress(OSError):
                os.kill(self._pid, number)

    def _note_shared(self) -> None:
        """Note which memory the rank shares; MPI leaves it behind where it is killed."""
        with contextlib.suppress(OSError), open(f"/proc/{self._pid}/maps") as file:
            for line in file:
                path = line[line.find("/") :].strip() if "/" in line else ""
                if path.startswith(FORGOTTEN):
                    self._shared.add(path)

    def _reap(self) -> bool:
        """Take leave of who has died; return whether the rank has, now."""
        if self._status is not None:
            return False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    return True
                if pid == 0:
                    break
        return False

    def _bury(self, outputs: dict[int, Lines]) -> None:
        """End what the rank has left behind, and tell what it has said last, and how it ended."""
        seconds = time.monotonic() - self._started
        kill_all_below()
        for path in self._shared:
            with contextlib.suppress(OSError):
                os.unlink(path)
        for fd in list(outputs):
            while fd in outputs and self._read(fd, outputs):
                pass
            if fd in outputs:
                self._close(fd, outputs)
        self._say(ENDED, {"status": self._status, "seconds": seconds})

    def _read(self, fd: int, outputs: dict[int, Lines]) -> bool:
        """Read what the rank has written; return whether there may be more."""
        lines = outputs[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close(fd, outputs)
            return False
        self._send(lines.kind, lines.add(data))
        return True

    def _close(self, fd: int, outputs: dict[int, Lines]) -> None:
        lines = outputs.pop(fd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)
        os.close(fd)
        self._send(lines.kind, lines.end())

    # --- the launcher

    def _read_only_if_sent(self, outputs: dict[int, Lines]) -> None:
        """Leave the rank's output where it is, as long as the launcher takes no more of it."""
        wanted = len(self._outgoing) < AHEAD
        for fd in outputs:
            registered = fd in self._selector.get_map()
            if wanted and not registered:
                self._selector.register(fd, selectors.EVENT_READ)
            elif registered and not wanted:
                self._selector.unregister(fd)
        if self._connection is not None:
            writes = selectors.EVENT_WRITE if self._outgoing else 0
            self._selector.modify(self._connection, selectors.EVENT_READ | writes)

    def _say(self, kind: bytes, what: dict[str, object]) -> None:
        self._send(kind, json.dumps(what).encode())

    def _send(self, kind: bytes, data: bytes) -> None:
        if data and self._connection is not None:
            self._outgoing += HEAD.pack(kind, len(data)) + data

    def _talk(self, events: int) -> None:
        assert self._connection is not None
        try:
            if events & selectors.EVENT_WRITE:
                del self._outgoing[: self._connection.send(self._outgoing)]
            if events & selectors.EVENT_READ:
                orders = self._connection.recv(64)
                if not orders:
                    raise ConnectionError
                for number in orders:
                    if number == DISMISSED or self._status is not None:
                        self._dismissed = True
                    if number != DISMISSED:
                        self._pass_on(number)
        except BlockingIOError:
            pass
        except OSError:  # the launcher is gone, and nobody waits for the rank any more
            self._selector.unregister(self._connection)
            self._connection = None
            self._outgoing.clear()
            self._dismissed = True
            self._pass_on(signal.SIGKILL)

    def _send_all(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.settimeout(REACH)
                self._connection.sendall(self._outgoing)
            self._connection.close()


def _who() -> dict[str, object]:
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "-1")
    return {
        "token": os.environ[LAUNCH].split()[0],
        "rank": int(rank),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _reach_launcher() -> socket.socket | None:
    for address in os.environ[LAUNCH].split()[1:]:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            return socket.create_connection((host, int(port)), timeout=REACH)
    return None


def _become(command: list[str]) -> NoReturn:
    """Be the program of a command instead of this one."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"minidist.launch: {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def main(arguments: list[str]) -> int:
    """Be a supervisor; or, with --tied and the launcher's process first, become mpiexec."""
    if arguments[0] == "--tied":
        die_with_parent(int(arguments[1]), signal.SIGTERM)
        _become(arguments[2:])
    adopt_orphans()
    die_with_parent(os.getppid(), signal.SIGTERM)
    connection = _reach_launcher()
    if connection is None:
        where = " or ".join(os.environ[LAUNCH].split()[1:])
        print(
            f"minidist.launch: {socket.gethostname()} cannot reach the launcher at {where}; does a "
            "firewall stand between them?",
            file=sys.stderr,
        )
        return 1
    return Supervisor(connection).run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
