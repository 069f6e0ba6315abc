"""Threads that are started once and used again: the workers of a strategy.

Guarantees
  * A worker does one job at a time; starting a job costs a hand-over, not a thread.
  * Workers that were given back are taken again in the order in which they were given back, so
    replica i runs on the same thread as long as nothing goes wrong.
  * No worker outlives its pool's `close` or the interpreter, except one that was abandoned while
    it ran somebody's code: it ends when that code does.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from minidist import observe, threads
from minidist.errors import ContextError, ForkError
from minidist.kernels.rendezvous import Fence

# Seconds that a waiting thread polls before it sleeps: longer than a run of an empty function, so
# that runs after each other find their threads awake. It yields its core meanwhile.
SPIN = 100e-6


def _end() -> None:
    """The job that is a worker's last."""


class Worker:
    """A thread that does one job after another; `post` must not be called before the last ended.

    To post the same job twice, because a signal came in between, makes it run once or twice.
    """

    def __init__(self, number: int) -> None:
        self.abandoned = False
        self.over = False  # whether it does nothing more
        self._posted = Fence(SPIN)
        self._job: Callable[[], None] | None = None
        self.thread = threading.Thread(
            target=self._loop, name=f"minidist worker {number}", daemon=True
        )
        threads.start(self.thread)

    def post(self, job: Callable[[], None]) -> None:
        self._job = job
        self._posted.advance()
        if observe.watching:
            observe.woke(self.thread)

    def _has(self, jobs: int) -> bool:
        return self._posted.value >= jobs

    def _loop(self) -> None:
        jobs = 0
        while not self.abandoned:
            jobs += 1
            if observe.watching:
                observe.waiting(partial(self._has, jobs))
            self._posted.wait(jobs)
            job, self._job = self._job, None
            if job is _end:
                break
            if job is not None:
                job()
                del job
        self.over = True
        if observe.watching:
            observe.ending()


class Pool:
    """The threads of one strategy, started when first needed and kept.

    Raises ForkError where the process was forked since: threads do not survive a fork.
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._made = 0
        self.closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        _pools.add(self)

    def take(self, count: int) -> list[Worker]:
        if os.getpid() != self._pid:
            raise ForkError(
                f"this process ({os.getpid()}) was forked from {self._pid} after its strategy had "
                "been made, and threads do not survive a fork; make the strategy in the child, or "
                "start processes with multiprocessing's 'spawn' method"
            )
        with self._lock:
            if self.closed:
                raise ContextError("this strategy is closed; make a new one to run anything")
            while len(self._idle) < count:
                self._idle.append(Worker(self._made))
                self._made += 1
            taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def give_back(self, workers: Sequence[Worker]) -> None:
        with self._lock:
            self._idle = [worker for worker in workers if not worker.abandoned] + self._idle
            closed = self.closed
        if closed:
            self.close()

    def drop(self, farewell: Callable[[], None]) -> None:
        """End the idle threads without waiting for them, having called `farewell` on one of them.

        For when nobody can use the pool any more. It takes no lock and may be called anywhere, also
        where the garbage collector was called.
        """
        for worker in self._idle:
            worker.abandoned = True  # and so ends after its next job
            worker.post(farewell if worker is self._idle[0] else _end)

    def close(self) -> None:
        """End the threads that are idle; those at work end when they are given back."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        if os.getpid() != self._pid:
            return
        for worker in idle:
            worker.post(_end)
        for worker in idle:
            if observe.watching:
                observe.waiting(partial(getattr, worker, "over"))
            worker.thread.join()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    """End replica threads before the interpreter is taken down around them."""
    for pool in list(_pools):
        pool.close()
