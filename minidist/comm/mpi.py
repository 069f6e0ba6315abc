"""MPI: this rank's way to the others.

One thread talks to MPI, from its start to its end, so that any MPI will do (MPI_THREAD_FUNNELED).
Asked for is more, for MPICH 5.0's own all-reduce of 4 MiB takes a quarter of the time then.
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
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.comm import implementation
from minidist.comm.window import Part
from minidist.errors import ClosedError, ClusterError
from minidist.kernels.rendezvous import Fence
from minidist.patience import REPORT_AFTER, TICK, Waiting

SPIN = 100e-6  # seconds for which a waiter polls before it sleeps
EAGER = 300e-6  # seconds without progress in which the thread makes no pause
PER_BYTE = 1e-9  # and so many more for each byte under way: MPI moves a message while it is asked
PAUSES = (50e-6, 1e-3)  # seconds of a pause: at first, and after 20 ms without progress
LOOKS = 50  # at what is under way, before the thread does anything else: each takes MPI further
PART, LEAST_PART = 1 << 30, 1 << 20  # bytes of a rank's part of the window; it is sparse
NOTICE = 0  # the tag of notices
NOTICE_BYTES = 2048
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # what mpirun --with-ft ulfm says to its processes
DESERTED = b"deserted"  # the notice of a rank that fails while others may be ending
DESERTED_ENDS = 10.0  # seconds after which who has sent it has ended the job, or never will
ABORT = 5.0  # seconds that MPI has to end all ranks, before this one simply ends
START = 300.0  # seconds that MPI has to start: programs may do much before they connect


class Pending:
    """Something that was handed to the engine: done when its fence has reached 1.

    bell: a fence that is raised too, of who waits for any of several. nbytes: how many are under
    way as soon as it is begun; 0 where the other side may take its time.
    """

    __slots__ = ("bell", "buffer", "failure", "fence", "nbytes", "result")

    def __init__(self, buffer: Any = None, bell: Fence | None = None, nbytes: int = 0) -> None:
        self.fence = Fence(SPIN)
        self.bell = bell
        self.nbytes = nbytes
        self.buffer = buffer  # kept while MPI reads or writes it
        self.failure: BaseException | None = None
        self.result: Any = None

    @property
    def done(self) -> bool:
        return self.fence.value > 0

    def finish(self, result: Any = None, failure: BaseException | None = None) -> None:
        self.result, self.failure, self.buffer = result, failure, None
        self.fence.advance()
        if self.bell is not None:
            self.bell.advance()

    def get(self) -> Any:
        """Return what came of it, once it is done; raises what it has raised."""
        if self.failure is not None:
            raise self.failure
        return self.result


def _other_processes() -> str:
    return (
        "this process waits for the others of its job to start MPI; has one of them ended before "
        "that, or have fewer been started than the launcher says?"
    )


Done = dict[int, tuple[int, BaseException | None]]


class Engine:
    """The thread that talks to MPI, and who this rank is among all.

    brought: some bytes of this rank, which every other gets. prepare: what is called with mpi4py's
    module before MPI starts.
    Raises ClusterError where MPI is missing or does not start, HangError where it waits for others.
    """

    def __init__(self, brought: bytes = b"", prepare: Callable[[Any], None] | None = None) -> None:
        self.rank = 0
        self.size = 1
        self.hosts: tuple[str, ...] = ()  # by rank: the name of its machine
        self.brought: tuple[bytes, ...] = (brought,)  # by rank: what it has brought
        self.implementation = ""
        self.memory: dict[int, np.ndarray[Any, Any]] = {}  # the window, by rank of this machine
        self.part: Part | None = None  # this rank's part of it; None: nobody shares memory
        self.notices: list[tuple[int, bytes]] = []  # all that were heard, with their ranks
        self._posts: deque[Callable[[], None]] = deque()
        self._posted = Fence(0.0)
        self._taken = 0
        self._requests: list[Any] = []
        self._pendings: list[Pending] = []
        self._closing = False
        self._outlives = os.environ.get(FAULT_TOLERANT) == "1"  # other ranks, if these die
        self._deserted: float | None = None  # when another rank said it will not come to MPI's end
        self.failing = False  # whether this process ends with a status of its own that says so
        self._mpi: Any = None
        self._world: Any = None
        self._prepare = prepare
        started = Pending()
        self._thread = threading.Thread(
            target=self._live, args=(started,), name="minidist-mpi", daemon=True
        )
        self._thread.start()
        waiting = Waiting(REPORT_AFTER, START)
        while not started.done:  # in between Python handles signals
            waiting.tick(started.fence, 1, _other_processes)
        started.get()
        atexit.register(self.close)

    # --- for any thread

    def send(self, to: int, tag: int, array: np.ndarray[Any, Any]) -> Pending:
        """Send a contiguous array to a rank; it may be written again when this is done."""
        return self._request(array, lambda buffer: self._world.Isend(buffer, to, tag))

    def receive(
        self, source: int, tag: int, array: np.ndarray[Any, Any], bell: Fence | None = None
    ) -> Pending:
        """Receive into a contiguous array, of at least the size that was sent, from a rank.

        Messages between two ranks with one tag arrive in the order in which they were sent.
        """
        return self._request(array, lambda buffer: self._world.Irecv(buffer, source, tag), bell)

    def start(self, begin: Callable[[Any, Any], Any], nbytes: int) -> Pending:
        """Let the thread call `begin(MPI, COMM_WORLD)`, which returns an MPI request.

        nbytes: how many it moves, for patience with it.
        """
        return self._request(None, lambda _: begin(self._mpi, self._world), nbytes=nbytes)

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
        if self.runs:
            self.call(lambda mpi, world: world.Abort(status)).fence.wait(1, ABORT)
        os._exit(status)

    def desert(self) -> None:
        """Tell all ranks that this one will not come to the end of MPI."""
        if not self._closing and self.runs:
            told = [self.notify(to, DESERTED) for to in range(self.size) if to != self.rank]
            for pending in told:
                pending.fence.wait(1, TICK)

    def close(self) -> None:
        """Wait until all ranks have closed, then end MPI. No message may be handed in after it.

        A process that has begun MPI ends only together with the others; until then it sleeps. Where
        another has deserted, it ends without MPI's end: at once if it is `failing` too.
        """
        if not self._closing and self.runs:
            self._closing = True
            self._post(lambda: None)
            self._thread.join()

    @property
    def runs(self) -> bool:
        """Whether there is the thread that talks to MPI: not in a child that was forked."""
        return self._thread.is_alive()

    def has_ended(self) -> bool:
        """Return whether MPI has come to its end in this process."""
        return bool(self._mpi.Is_finalized())

    # --- the thread

    def _post(self, do: Callable[[], None]) -> None:
        if not self.runs:
            raise ClosedError("MPI has ended in this process; no message can be sent any more")
        self._posts.append(do)
        self._posted.advance()

    def _request(
        self,
        array: Any,
        begin: Callable[[Any], Any],
        bell: Fence | None = None,
        nbytes: int = 0,
    ) -> Pending:
        if array is not None and bell is None:
            nbytes = array.nbytes
        pending = Pending(array, bell, nbytes)

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
            elif idle < EAGER or idle < EAGER + PER_BYTE * sum(p.nbytes for p in self._pendings):
                pause = 0.0
            else:
                pause = PAUSES[idle > 0.02]
            self._posted.wait(self._taken + 1, pause)
        self._end()

    def _begin(self) -> None:
        MPI = implementation.load()
        if not MPI.Is_initialized():
            if self._prepare is not None:
                self._prepare(MPI)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        elif MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ClusterError(
                "MPI was started in this process already, for one thread only; let minidist start "
                "it, or ask for MPI_THREAD_SERIALIZED"
            )
        self._mpi = MPI
        self._world = MPI.COMM_WORLD.Dup()
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._world.rank, self._world.size
        everybody = self._world.allgather((MPI.Get_processor_name(), self.brought[0]))
        self.hosts = tuple(host for host, _ in everybody)
        self.brought = tuple(brought for _, brought in everybody)
        implementation.take_names_off()  # by now all ranks have what they share
        self.implementation = implementation.version()
        self._share_memory()

    def _share_memory(self) -> None:
        """Make the window that the ranks of this machine share; it takes up what is used of it."""
        if self._outlives:  # and a window does not
            return
        machine = self._world.Split_type(self._mpi.COMM_TYPE_SHARED)
        ranks = machine.allgather(self.rank)
        shm = "/dev/shm"  # where MPI has it, so that its size is what there is
        free = shutil.disk_usage(shm).free if os.path.isdir(shm) else 0
        nbytes = machine.allreduce(min(PART, free // (2 * len(ranks))), self._mpi.MIN)
        if len(ranks) == 1 or nbytes < LEAST_PART:
            return
        window = self._mpi.Win.Allocate_shared(nbytes, 1, comm=machine)
        for i, rank in enumerate(ranks):
            self.memory[rank] = np.frombuffer(window.Shared_query(i)[0], np.uint8)
        self.part = Part(self.memory[self.rank])

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
        done = self._test_each() if self._outlives else self._test_some()
        if not done:
            return moved
        heard = self._pendings[0]
        finished = [(self._pendings[i], failure) for i, (_, failure) in done.items()]
        self._requests = [r for i, r in enumerate(self._requests) if i not in done]
        self._pendings = [p for i, p in enumerate(self._pendings) if i not in done]
        if 0 in done:
            self._hear(bytes(heard.buffer).rstrip(b" "), *done[0])
            self._listen_on()
        for pending, failure in finished:
            pending.finish(failure=failure)
        return True

    def _hear(self, notice: bytes, rank: int, failure: BaseException | None) -> None:
        """Note what was received as a notice, if it is one."""
        if notice == DESERTED:
            self._deserted = self._deserted or time.monotonic()
        elif failure is None:
            self.notices.append((rank, notice))

    def _test_some(self) -> Done:
        """Return which requests are done, by number: from which rank, and what was wrong."""
        statuses = [self._mpi.Status() for _ in self._requests]
        looks = LOOKS if len(self._requests) > 1 else 1
        try:
            while not (done := self._mpi.Request.Testsome(self._requests, statuses) or []):
                looks -= 1
                if looks == 0 or self._posts:
                    break
        except self._mpi.Exception as failure:  # of any of those that are done now
            error = self._as_error(failure)
            null = self._mpi.REQUEST_NULL
            return {i: (-1, error) for i, request in enumerate(self._requests) if request == null}
        return {i: (status.source, None) for i, status in zip(done, statuses, strict=False)}

    def _test_each(self) -> Done:
        """Return the same, asking one by one: then each says what is wrong with it alone."""
        done: Done = {}
        for i, request in enumerate(self._requests):
            status = self._mpi.Status()
            try:
                if request.Test(status):
                    done[i] = status.source, None
            except self._mpi.Exception as failure:
                if failure.Get_error_class() == self._mpi.ERR_PROC_FAILED_PENDING:
                    self._world.Ack_failed()  # it goes on, for those that live
                else:
                    done[i] = -1, self._as_error(failure)
        return done

    def _as_error(self, failure: BaseException) -> BaseException:
        if self._mpi is not None and isinstance(failure, self._mpi.Exception):
            return ClusterError(f"MPI: {failure.Get_error_string()}")
        return failure

    def _end(self) -> None:
        if self._mpi.Is_finalized():
            return
        try:
            if not self._meet_last():
                return
        except self._mpi.Exception:
            if not self._outlives:
                raise
            return  # somebody has died meanwhile
        self._mpi.Finalize()

    def _meet_last(self) -> bool:
        """Wait until all ranks have come to the end; say whether all do.

        Where some do not, MPI is not ended either: its own end might wait for them for ever.
        """
        if self._outlives and self._world.Get_failed().size:
            return False
        all_closed = self._world.Ibarrier()
        while not all_closed.Test():
            self._progress()  # which hears notices
            # Who has deserted ends the job in a moment. A process that ended with status 0 before
            # that, and before MPI's end, would make the whole job look like a success.
            limit = math.inf if self._deserted is None else self._deserted + DESERTED_ENDS
            if time.monotonic() > limit or (self.failing and limit < math.inf):
                return False
            self._posted.wait(self._taken + 1, PAUSES[1])
        for request in self._requests:
            request.Cancel()
            request.Wait()
        return True


def _as_bytes(array: np.ndarray[Any, Any] | None) -> Any:
    """Return an array's memory as bytes, whatever its dtype."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError("a message must be a contiguous array")
    return array.reshape(-1).view(np.uint8)
