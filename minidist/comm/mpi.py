"""MPI: this rank's way to the others. The only module that imports mpi4py.

One thread talks to MPI, from its start to its end, so that any MPI will do (MPI_THREAD_FUNNELED).
Everybody else hands it a message and waits for a fence, as for any other work:

    caller                    the engine's thread
    send, receive   ──►       MPI_Isend, MPI_Irecv
    wait for a fence  ◄──     MPI_Testsome until it is done

While messages are under way the thread looks at them again and again, at first without a pause and
then with longer and longer ones, so that a rank that waits does not eat a core. With nothing under
way it sleeps until it is handed something.

Besides what is asked for, one receive is always under way: that of *notices*, by which a rank tells
all others that it has failed or that it takes no further part.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.errors import ClosedError, ClusterError
from minidist.kernels.rendezvous import Fence

SPIN = 100e-6  # seconds for which a waiter polls before it sleeps
EAGER = 300e-6  # seconds without progress in which the thread makes no pause
PAUSES = (50e-6, 1e-3)  # seconds of a pause: at first, and after 20 ms without progress
NOTICE = 0  # the tag of notices
NOTICE_BYTES = 2048


class Pending:
    """Something that was handed to the engine: done when its fence has reached 1."""

    __slots__ = ("buffer", "failure", "fence", "result")

    def __init__(self, buffer: Any = None) -> None:
        self.fence = Fence(SPIN)
        self.buffer = buffer  # kept while MPI reads or writes it
        self.failure: BaseException | None = None
        self.result: Any = None

    @property
    def done(self) -> bool:
        return self.fence.value > 0

    def finish(self, result: Any = None, failure: BaseException | None = None) -> None:
        self.result, self.failure, self.buffer = result, failure, None
        self.fence.advance()

    def get(self) -> Any:
        """Return what came of it, once it is done; raises what it has raised."""
        if self.failure is not None:
            raise self.failure
        return self.result


class Engine:
    """The thread that talks to MPI, and who this rank is among all.

    Raises ClusterError where MPI is missing or does not start.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.hosts: tuple[str, ...] = ()  # by rank: the name of its machine
        self.library = ""
        self.notices: list[tuple[int, bytes]] = []  # all that were heard, with their ranks
        self._posts: deque[Callable[[], None]] = deque()
        self._posted = Fence(0.0)
        self._taken = 0
        self._requests: list[Any] = []
        self._pendings: list[Pending] = []
        self._closing = False
        self._mpi: Any = None
        self._world: Any = None
        started = Pending()
        self._thread = threading.Thread(
            target=self._live, args=(started,), name="minidist-mpi", daemon=True
        )
        self._thread.start()
        started.fence.wait(1)
        started.get()
        atexit.register(self.close)

    # --- for any thread

    def send(self, to: int, tag: int, array: np.ndarray[Any, Any]) -> Pending:
        """Send a contiguous array to a rank; it may be written again when this is done."""
        return self._request(array, lambda buffer: self._world.Isend(buffer, to, tag))

    def receive(self, source: int, tag: int, array: np.ndarray[Any, Any]) -> Pending:
        """Receive into a contiguous array, of just the size that was sent, from a rank.

        Messages between two ranks with one tag arrive in the order in which they were sent.
        """
        return self._request(array, lambda buffer: self._world.Irecv(buffer, source, tag))

    def start(self, begin: Callable[[Any, Any], Any]) -> Pending:
        """Let the thread call `begin(MPI, COMM_WORLD)`, which returns an MPI request."""
        return self._request(None, lambda _: begin(self._mpi, self._world))

    def call(self, fn: Callable[[Any, Any], Any]) -> Pending:
        """Let the thread call `fn(MPI, COMM_WORLD)` and keep what it returns as the result.

        While it runs no message makes progress, so it must not wait for long.
        """
        pending = Pending()

        def do() -> None:
            try:
                pending.finish(fn(self._mpi, self._world))
            except BaseException as failure:
                pending.finish(failure=self._as_error(failure))

        self._post(do)
        return pending

    def notify(self, to: int, notice: bytes) -> Pending:
        """Send a notice, which another rank hears whatever it is doing."""
        array = np.frombuffer(notice[:NOTICE_BYTES].ljust(NOTICE_BYTES, b" "), np.uint8)
        return self.send(to, NOTICE, array)

    def abort(self, status: int) -> None:
        """End the processes of all ranks, now. Does not return."""
        self.call(lambda mpi, world: world.Abort(status)).fence.wait(1)

    def close(self) -> None:
        """Wait until all ranks have closed, then end MPI. No message may be handed in after it.

        A process that has begun MPI ends only together with the others; until then it sleeps.
        """
        if not self._closing:
            self._closing = True
            self._post(lambda: None)
            self._thread.join()

    # --- the thread

    def _post(self, do: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise ClosedError("MPI has ended in this process; no message can be sent any more")
        self._posts.append(do)
        self._posted.advance()

    def _request(self, array: Any, begin: Callable[[Any], Any]) -> Pending:
        pending = Pending(array)

        def do() -> None:
            try:
                request = begin(_as_bytes(array))
            except BaseException as failure:
                pending.finish(failure=self._as_error(failure))
                return
            self._requests.append(request)
            self._pendings.append(pending)

        self._post(do)
        return pending

    def _live(self, started: Pending) -> None:
        try:
            self._begin()
        except BaseException as failure:
            started.finish(failure=failure)
            return
        started.finish()
        self._listen_on()
        since = time.monotonic()
        while not self._closing or self._posts:
            if self._progress():
                since = time.monotonic()
                continue
            idle = time.monotonic() - since
            if len(self._requests) == 1:  # that of notices
                pause = 0.01
            elif idle < EAGER:
                pause = 0.0
            else:
                pause = PAUSES[idle > 0.02]
            self._posted.wait(self._taken + 1, pause)
        self._end()

    def _begin(self) -> None:
        try:
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as cause:
            raise ClusterError(
                f"MPI cannot be used here: {cause}. pip install 'minidist[mpi]' brings mpi4py and "
                "an MPI with its mpiexec; python -m minidist.doctor tells more"
            ) from cause
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_FUNNELED)
        elif MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ClusterError(
                "MPI was started in this process already, for one thread only; let minidist start "
                "it, or ask for MPI_THREAD_SERIALIZED"
            )
        self._mpi = MPI
        self._world = MPI.COMM_WORLD.Dup()
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._world.rank, self._world.size
        self.hosts = tuple(self._world.allgather(MPI.Get_processor_name()))
        self.library = MPI.Get_library_version().split("\n")[0].strip("\0 ")

    def _listen_on(self) -> None:
        buffer = bytearray(NOTICE_BYTES)
        request = self._world.Irecv([buffer, self._mpi.BYTE], self._mpi.ANY_SOURCE, NOTICE)
        pending = Pending(buffer)
        self._requests.insert(0, request)
        self._pendings.insert(0, pending)

    def _progress(self) -> bool:
        """Begin what was handed in, and finish what is done; say whether there was anything."""
        moved = False
        while self._posts:
            self._taken += 1
            self._posts.popleft()()
            moved = True
        statuses = [self._mpi.Status() for _ in self._requests]
        try:
            done = self._mpi.Request.Testsome(self._requests, statuses)
        except self._mpi.Exception:
            return self._find_failed() or moved
        if not done:
            return moved
        finished = [self._pendings[i] for i in done]
        notice = bytes(self._pendings[0].buffer) if 0 in done else None
        source = statuses[done.index(0)].source if 0 in done else 0
        left = set(done)
        self._requests = [r for i, r in enumerate(self._requests) if i not in left]
        self._pendings = [p for i, p in enumerate(self._pendings) if i not in left]
        if notice is not None:
            self._listen_on()
            self.notices.append((source, notice.rstrip(b" ")))
        for pending in finished:
            pending.finish()
        return True

    def _find_failed(self) -> bool:
        """Finish those requests that have failed, one by one."""
        kept = []
        for request, pending in zip(self._requests, self._pendings, strict=True):
            try:
                done = request.Test()
            except self._mpi.Exception as failure:
                pending.finish(failure=self._as_error(failure))
                continue
            if done:
                pending.finish()
            else:
                kept.append((request, pending))
        changed = len(kept) < len(self._requests)
        self._requests = [request for request, _ in kept]
        self._pendings = [pending for _, pending in kept]
        return changed

    def _as_error(self, failure: BaseException) -> BaseException:
        if self._mpi is not None and isinstance(failure, self._mpi.Exception):
            return ClusterError(f"MPI: {failure.Get_error_string()}")
        return failure

    def _end(self) -> None:
        if self._mpi.Is_finalized():
            return
        all_closed = self._world.Ibarrier()
        while not all_closed.Test():
            time.sleep(PAUSES[1])
        for request in self._requests:
            request.Cancel()
            request.Wait()
        self._mpi.Finalize()


def _as_bytes(array: np.ndarray[Any, Any] | None) -> Any:
    """Return an array's memory as bytes, whatever its dtype."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError("a message must be a contiguous array")
    return array.reshape(-1).view(np.uint8)
