"""Run: a function once per replica, each on a thread of its own, and the points where they meet.

`run` gives each replica its own thread out of a pool. They compute at the same time until they meet
in `merge_call`: the last to arrive runs the merge function for all of them, in cross-replica
context, while the others wait in compiled code with the GIL released.

How a run ends
  1. Every replica returns: the results are regrouped.
  2. A replica or a merge function raises: the first exception in time is the run's. All fences are
     lifted, so that replicas that wait end at once and those that compute end at their next
     meeting. Who has not ended after `GRACE` seconds is abandoned: its thread is named in a note
     and replaced, and nothing it does later reaches a run.
  3. A replica finishes, or meets for something else, while another waits for it: a
     MergeMismatchError, which then ends the run as in 2.
  4. Replicas wait for one that does not come: a report after `report_after` seconds, a HangError
     after `deadline` seconds, counted from the first arrival. So they do for one that does not come
     out of a merge function, counted from when all had met; a run nested in it has its own count.
  5. KeyboardInterrupt, or what another signal handler raises, in the calling thread: as in 2.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from minidist import context, diagnosis, observe, tape
from minidist.errors import HangError, UsageError
from minidist.kernels.rendezvous import Fence, Rendezvous
from minidist.patience import stack
from minidist.pool import SPIN, Pool, Worker
from minidist.regrouping import regroup
from minidist.replica import Replica
from minidist.structure import map_leaves
from minidist.values import DistributedValues, select_replica

if TYPE_CHECKING:
    from minidist.device import Device

log = logging.getLogger("minidist")
_numbers = itertools.count(1)

GRACE = 0.5  # seconds that a failed run gives its replicas to notice
TICK = 0.05  # seconds between two looks of the calling thread at signals and deadlines


class Stopped(BaseException):
    """Ends a replica whose run has failed elsewhere. It never reaches the caller of `run`."""


class Run:
    """One run of a function on all replicas of a strategy."""

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[Device],
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        step: int,
        concurrent: bool,
        report_after: float,
        deadline: float,
    ) -> None:
        self.strategy = strategy
        self.n = len(devices)
        self.first = strategy.first_replica  # the number, among all, of this process's first one
        self._devices = devices
        self.fn, self._args, self._kwargs = fn, args, kwargs
        self._caller = context.frame()
        self._step = step
        self.number = next(_numbers)  # of all runs of the process
        self._concurrent = concurrent
        self._report_after, self.deadline = report_after, deadline
        self.rendezvous = Rendezvous(self.n, SPIN)
        self._ended = Fence(SPIN)  # raised by the last replica to end
        self._turn = Fence()  # strict turns: meeting · n + replica
        self.workers: Sequence[Worker] = ()
        self._results: list[Any] = [None] * self.n
        self.meetings_of = [0] * self.n  # how many meetings each has come to
        self.merging: int | None = None  # the replica that runs a merge function for all
        self._waits_since: float | None = None  # when the first replica began to wait
        self._nested = 0  # runs that a merge function is making
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._called_off = False  # the caller has failed: replicas that have not begun do not
        self._over = False

    @property
    def entry(self) -> CodeType:
        """The code below which a replica's stack is that of the function."""
        return Run._replica.__code__

    # --- on the calling thread

    def __call__(self, pool: Pool) -> Any:
        # What is set in context variables (NumPy's errstate is one) goes along, and not back.
        jobs = [partial(contextvars.copy_context().run, self._replica, i) for i in range(self.n)]
        parent: Run | None = self._caller.run  # where this run is nested in a merge function
        if parent is not None:
            parent._nested += 1
        try:
            self.workers = pool.take(self.n)
            if observe.watching:
                observe.posted(self)
            try:
                for worker, job in zip(self.workers, jobs, strict=True):
                    worker.post(job)
                self._watch(parent)
            except BaseException as failure:  # Ctrl-C, a hang, or a run around this one ended
                self._fail(failure, None)
                self._called_off = True
                for worker, job in zip(self.workers, jobs, strict=True):
                    worker.post(job)  # perhaps it never was; once more does nothing
            if self._failure is not None:
                self._abandon()
        finally:
            self._over = True
            if parent is not None:
                parent._nested -= 1
                parent._waits_since = time.monotonic()
            self._give_back(pool)
            if observe.watching:
                observe.joined(self)
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # its traceback refers to this run: no circle
        if observe.watching:
            observe.verify()
        how: dict[str, Any] = {"devices": self._devices, "first": self.first}
        return regroup(self._results, numbers_are_shared=False, **how)

    def _watch(self, parent: Run | None) -> None:
        """Wait until all have ended or one has failed. Between two waits Python handles signals."""
        reported: float | None = None
        if observe.watching:
            observe.waiting(lambda: self._ended.value > 0 or self._failure is not None)
        while not self._ended.wait(1, TICK):
            if self._failure is not None:
                return
            if parent is not None and parent.rendezvous.stopped:
                raise Stopped
            dead = [i for i in range(self.n) if not self.workers[i].thread.is_alive()]
            if dead:
                raise HangError(
                    f"the threads of {diagnosis.names(self, dead)} were ended from outside the run"
                )
            since = self._waits_since
            if since is None or self._nested:
                continue
            waited = time.monotonic() - since
            if waited > self.deadline:
                raise HangError(diagnosis.waiting(self, waited))
            if waited > self._report_after and reported != since:
                reported = since
                log.warning("%s", diagnosis.waiting(self, waited))

    def _abandon(self) -> None:
        """Give the replicas of a failed run a moment to end; name those that do not."""
        if self._ended.wait(1, GRACE):
            return
        assert self._failure is not None
        for i, worker in enumerate(self.workers):
            if not self.rendezvous.departed[i]:
                diagnosis.note(
                    self._failure,
                    f"replica {self.first + i} ({self._devices[i].short}) was still running "
                    f"{GRACE:g} s later and cannot be stopped from outside; its thread was "
                    f"abandoned at\n{stack(worker.thread)}",
                )

    def _give_back(self, pool: Pool) -> None:
        if self.rendezvous.left < self.n:  # whatever happened: who still runs is no idle worker
            self.rendezvous.stop()
            self._turn.lift()
            for worker, has_ended in zip(self.workers, self.rendezvous.departed, strict=False):
                worker.abandoned = not has_ended
        pool.give_back(self.workers)

    # --- on the replicas' threads

    def _replica(self, i: int) -> None:
        """Run the function as replica `i`."""
        device = self._devices[i]
        device.settle()
        caller = self._caller
        old = context.enter(
            context.Frame(
                strategy=self.strategy,
                replica=Replica(self, i, device),
                device=device,
                draws={},
                replica_id=self.strategy.site.first_everywhere + i,
                step=self._step,
                run=self,
                # What a replica inherits from the caller.
                name_scope=f"{caller.name_scope}replica_{i}/" if i else caller.name_scope,
                creators=caller.creators,
                dtype=caller.dtype,
                newest=caller.newest,
            )
        )
        if observe.watching:
            observe.started(self, i)
        try:
            if self._called_off:
                raise Stopped
            if not self._concurrent:
                self._take_turn(i, 0)
            args, kwargs = self._args, self._kwargs
            if args:
                args = tuple([self._component(i, arg) for arg in args])
            if kwargs:
                kwargs = {name: self._component(i, arg) for name, arg in kwargs.items()}
            if observe.watching:
                with self._told("replica", self.fn, i, device=device.short, step=self._step):
                    self._results[i] = self.fn(*args, **kwargs)
            else:
                self._results[i] = self.fn(*args, **kwargs)
            self._finish(i)
        except Stopped:
            pass
        except BaseException as failure:
            who = f"replica {self.first + i} of {self.strategy.num_replicas}"
            self._fail(failure, f"{who}, on {device.short}")
        finally:
            context.leave(old)
            tape.pause()  # for good: those that were left open
            if observe.watching:
                observe.ended(self, i)
            self._leave(i)

    def _component(self, i: int, argument: Any) -> Any:
        """Return what replica `i` gets of an argument."""

        def select(leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                return leaf
            if len(leaf.values) > self.n:
                raise UsageError(
                    f"run got a {type(leaf).__name__} with {len(leaf.values)} components, too many "
                    f"for the {self.n} of {self.strategy!r}; is it another strategy's?"
                )
            return leaf.of_replica(i)

        return map_leaves(select, argument)

    def _finish(self, i: int) -> None:
        """Note that replica `i` has returned, which the others must do too."""
        if self._waits_since is None and self.n > 1:
            self._waits_since = time.monotonic()  # the end of a run is a meeting too
        self._leave(i)
        if self.rendezvous.broken:
            raise diagnosis.unequal(self)
        if not self._concurrent:
            self._turn.advance()

    def _leave(self, i: int) -> None:
        if self.rendezvous.leave(i):
            self._ended.advance()

    def meet(
        self,
        i: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: context.Frame,
    ) -> Any:
        """Meet the other replicas; the last to arrive merges."""
        rendezvous = self.rendezvous
        self.meetings_of[i] += 1
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        self.check()
        if observe.watching:
            observe.arrived(self, i, self.meetings_of[i])
        meeting = rendezvous.arrive(i, (fn, args, kwargs, frame))
        if meeting == 0:
            self.merging = i
            if observe.watching:
                observe.met(self, i, self.meetings_of[i])
            self._waits_since = time.monotonic() if self.n > 1 else None  # who is alone waits not
            with self._told("merge", fn, i) if observe.watching else observe.nothing:
                result = self._merge(rendezvous.payloads)
            self.check()
            self.merging = self._waits_since = None
            if observe.watching:
                observe.released(self, i, self.meetings_of[i])
            rendezvous.open(result)
            if not self._concurrent:
                self._turn.advance()
        else:
            if rendezvous.broken:
                unequal = diagnosis.unequal(self)
                self._fail(unequal, None)
                raise unequal
            if not self._concurrent:
                self._turn.advance()
            with self._told("wait", fn, i) if observe.watching else observe.nothing:
                if observe.watching:
                    observe.waiting(lambda: rendezvous.meetings >= meeting or rendezvous.stopped)
                result = rendezvous.wait(meeting)
            if rendezvous.meetings < meeting:
                raise Stopped
            # Once a meeting has taken place all go on from it, also if the run has failed since:
            # either all replicas apply what was combined there, or none does.
            if observe.watching:
                observe.released(self, i, self.meetings_of[i])
        if not self._concurrent:
            self._take_turn(i, self.meetings_of[i])
        return None if result is None else select_replica(i, result)

    def _told(
        self, kind: str, fn: Callable[..., Any], i: int, **about: Any
    ) -> AbstractContextManager[None]:
        """Return a with statement's way to tell of what replica `i` does, or waits for."""
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        return observe.span(
            kind, name, run=self.number, replica=i, meeting=self.meetings_of[i], **about
        )

    def check(self) -> None:
        """End the calling replica if the run has ended without it: it must not write any more."""
        if self.rendezvous.stopped:
            raise Stopped

    def _merge(self, payloads: Sequence[Any]) -> Any:
        """Run the merge function of replica 0 on everybody's arguments."""
        fn, args, kwargs, frame = payloads[0]
        # The caller's device and replica 0's scopes, as if replica 0 had gone on alone.
        # What it computes is no replica's, so the tape that this thread may have open is paused.
        old = context.enter(
            frame.but(
                replica=None, device=self._caller.device, replica_id=0, scope=None, outer=None
            )
        )
        tapes = tape.pause()
        try:
            for payload in payloads:
                if payload[0] is not fn:
                    diagnosis.check_same(self, [each[0] for each in payloads])
                    break
            how: dict[str, Any] = {"devices": self._devices, "first": self.first}
            if any(payload[1] for payload in payloads):
                args = regroup([payload[1] for payload in payloads], **how)
            if any(payload[2] for payload in payloads):
                kwargs = regroup([payload[2] for payload in payloads], **how)
            return fn(self.strategy, *args, **kwargs)
        except Stopped:
            raise
        except BaseException as failure:
            # Which replica came last is chance, so none may catch this and go on.
            number = self.meetings_of[0]
            self._fail(
                failure,
                f"the merge function of merge_call number {number}, for all replicas"
                f"{diagnosis.met(self)}",
            )
            raise
        finally:
            tape.resume(tapes)
            context.leave(old)

    def _take_turn(self, i: int, meetings: int) -> None:
        with self._told("turn", self.fn, i) if observe.watching else observe.nothing:
            if observe.watching:
                observe.waiting(lambda: self._turn.value >= meetings * self.n + i)
            self._turn.wait(meetings * self.n + i)
        self._waits_since = time.monotonic()  # from now on the others wait for this one
        self.check()

    # --- failures

    def _fail(self, failure: BaseException, where: str | None) -> None:
        """Note a failure, in `where` or in the caller, and wake everyone who waits."""
        with self._lock:
            if self._over:
                return
            if self._failure is None:
                self._failure = failure
                self.rendezvous.stop()
                self._turn.lift()
                if where is not None:
                    diagnosis.note(failure, f"raised in {where}")
            elif failure is not self._failure:
                diagnosis.note(
                    self._failure,
                    f"{where or 'the caller'} failed too: {diagnosis.summary(failure)}",
                )
