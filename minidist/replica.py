"""A thread for each replica: run a function once per replica, and let the replicas meet.

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
     after `deadline` seconds, counted from the first arrival.
  5. KeyboardInterrupt in the calling thread: as in 2.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import optree

from minidist import context
from minidist.errors import ContextError, HangError, MergeMismatchError
from minidist.kernels.rendezvous import Fence, Rendezvous
from minidist.pool import SPIN, Pool, Worker
from minidist.tape import stop_recording
from minidist.tensor import Tensor, to_device
from minidist.values import Mirrored, local_results, regroup, select_replica

if TYPE_CHECKING:
    from minidist.device import Device

log = logging.getLogger("minidist")

GRACE = 0.5  # seconds that a failed run gives its replicas to notice
TICK = 0.05  # seconds between two looks of the calling thread at signals and deadlines


class Stopped(BaseException):
    """Ends a replica whose run has failed elsewhere. It never reaches the caller of `run`."""


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_name!r} at {code.co_filename}:{line}"


def _code(fn: Any) -> Any:
    """Return what is the same for the same function defined anew in each replica."""
    return getattr(fn, "__code__", fn)


# --- replicas -----------------------------------------------------------------------------------


class Replica:
    """The replica context that a function in `run` finds: who it is, and the way to the others."""

    __slots__ = ("_run", "device", "replica_id")

    def __init__(self, run: Run, replica_id: int, device: Device) -> None:
        self._run = run
        self.replica_id = replica_id
        self.device = device

    @property
    def num_replicas(self) -> int:
        return self._run.n

    @property
    def strategy(self) -> Any:
        return self._run.strategy

    def merge_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(strategy, *args, **kwargs)` once for all replicas, in cross-replica context.

        Every replica must call it, the same number of times and with the same function. `fn` gets
        the replicas' arguments regrouped (PerReplica where they differ); each replica gets its own
        component of the result. What `fn` raises ends the run.

        Raises ContextError (a RuntimeError) where this is not the calling thread's replica.
        """
        frame = context.frame()
        if frame.replica is not self:
            raise ContextError(
                f"merge_call of replica {self.replica_id} was called in {context.describe(frame)}; "
                "call it on the replica's own thread, on what get_replica_context() returns there, "
                "and not inside a merge function"
            )
        caller = sys._getframe(1)
        return self._run.meet(
            self.replica_id, fn, args, kwargs, frame, (caller.f_code, caller.f_lineno)
        )

    def all_reduce(self, op: str, value: Any) -> Any:
        """Return the sum or mean over the replicas of each leaf of a structure.

        op: "sum" or "mean", as for Strategy.reduce. Each replica gets the result on its own device.
        """
        return self.merge_call(_all_reduce, op, value)

    def __repr__(self) -> str:
        return f"<replica {self.replica_id} of {self.num_replicas} on {self.device.short}>"


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
        self._devices = devices
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._caller = context.frame()
        self._step = step
        self._concurrent = concurrent
        self._report_after, self._deadline = report_after, deadline
        self._rendezvous = Rendezvous(self.n, SPIN)
        self._ended = Fence(SPIN)  # raised by the last replica to end
        self._turn = Fence()  # strict turns: meeting · n + replica
        self._results: list[Any] = [None] * self.n
        self._position: list[tuple[CodeType, int] | None] = [None] * self.n
        self._meeting_of = [0] * self.n  # how many meetings each has come to
        self._first_arrival: float | None = None
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._over = False

    # --- on the calling thread

    def __call__(self, pool: Pool) -> Any:
        workers = pool.take(self.n)
        try:
            try:
                for i, worker in enumerate(workers):
                    worker.post(_Job(self, i))
                self._watch(workers)
            except BaseException as failure:  # Ctrl-C, a hang, or a run around this one ended
                self._fail(failure, None)
            if self._failure is not None:
                self._abandon(workers)
        finally:
            self._over = True
            pool.give_back(workers)
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # its traceback refers to this run: no circle
        return regroup(self._results, devices=self._devices)

    def _watch(self, workers: Sequence[Worker]) -> None:
        """Wait until all have ended or one has failed. Between two waits Python handles signals."""
        parent = self._caller.run  # where this run is nested in a merge function of another
        reported: float | None = None
        while not self._ended.wait(1, TICK):
            if self._failure is not None:
                return
            if parent is not None and parent._rendezvous.stopped:
                raise Stopped
            since = self._first_arrival
            if since is None:
                continue
            waited = time.monotonic() - since
            if waited > self._deadline:
                raise HangError(self._report(workers, waited))
            if waited > self._report_after and reported != since:
                reported = since
                log.warning("%s", self._report(workers, waited))

    def _abandon(self, workers: Sequence[Worker]) -> None:
        """Give the replicas of a failed run a moment to end; name and abandon those that do not."""
        if self._ended.wait(1, GRACE):
            return
        assert self._failure is not None
        for i, worker in enumerate(workers):
            if not self._rendezvous.departed[i]:
                worker.abandoned = True
                self._failure.add_note(
                    f"replica {i} ({self._devices[i].short}) was still running {GRACE:g} s later "
                    "and cannot be stopped from outside; its thread was abandoned at\n"
                    f"{_stack(worker.thread)}"
                )

    def _report(self, workers: Sequence[Worker], waited: float) -> str:
        here = [i for i in range(self.n) if self._rendezvous.payloads[i] is not None]
        gone = [i for i in range(self.n) if self._rendezvous.departed[i]]
        missing = [i for i in range(self.n) if i not in here and i not in gone]
        lines = [
            f"replicas wait since {waited:.1f} s for {_names(missing)} "
            f"(the deadline is {self._deadline:g} s)"
        ]
        for i in here:
            lines.append(
                f"  replica {i} waits in its merge_call number {self._meeting_of[i]}, "
                f"in {self._at(i)}"
            )
        for i in gone:
            lines.append(f"  replica {i} has returned")
        for i in missing:
            lines.append(
                f"  replica {i} has come to {self._meeting_of[i]} merge_calls and is now at\n"
                f"{_stack(workers[i].thread)}"
            )
        return "\n".join(lines)

    # --- on the replicas' threads

    def replica(self, i: int) -> None:
        """Run the function as replica `i`."""
        device = self._devices[i]
        caller = self._caller
        name_scope = caller.name_scope if i == 0 else f"{caller.name_scope}replica_{i}/"
        old = context.enter(
            caller.but(
                strategy=self.strategy,
                replica=Replica(self, i, device),
                device=device,
                replica_id=i,
                run=self,
                update_device=None,
                name_scope=name_scope,
                step=self._step,
                draws={},
            )
        )
        try:
            if not self._concurrent:
                self._take_turn(i, 0)
            args, kwargs = self._args, self._kwargs
            if args:
                args = tuple([select_replica(i, arg) for arg in args])
            if kwargs:
                kwargs = {name: select_replica(i, arg) for name, arg in kwargs.items()}
            self._results[i] = self._fn(*args, **kwargs)
            self._finish(i)
        except Stopped:
            pass
        except BaseException as failure:
            self._fail(failure, i)
        finally:
            context.leave(old)
            self._leave(i)

    def _finish(self, i: int) -> None:
        """Note that replica `i` has returned, which the others must do too."""
        if self._first_arrival is None and self.n > 1:
            self._first_arrival = time.monotonic()  # the end of a run is a meeting too
        self._leave(i)
        if self._rendezvous.broken:
            raise self._unequal()
        if not self._concurrent:
            self._turn.advance()

    def _leave(self, i: int) -> None:
        if self._rendezvous.leave(i):
            self._ended.advance()

    def meet(
        self,
        i: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: context.Frame,
        position: tuple[CodeType, int],
    ) -> Any:
        """Meet the other replicas; the last to arrive merges."""
        rendezvous = self._rendezvous
        self._position[i] = position
        self._meeting_of[i] += 1
        if self._first_arrival is None:
            self._first_arrival = time.monotonic()
        if rendezvous.stopped:
            raise Stopped
        meeting = rendezvous.arrive(i, (fn, args, kwargs, frame))
        if meeting == 0:
            self._first_arrival = None  # nobody is missing any more
            result = self._merge(rendezvous.payloads)
            rendezvous.open(result)
            if not self._concurrent:
                self._turn.advance()
        else:
            if rendezvous.broken:
                raise self._unequal()
            if not self._concurrent:
                self._turn.advance()
            result = rendezvous.wait(meeting)
            if rendezvous.stopped:
                raise Stopped
        if not self._concurrent:
            self._take_turn(i, self._meeting_of[i])
        return select_replica(i, result)

    def _merge(self, payloads: Sequence[Any]) -> Any:
        """Run the merge function of replica 0 on everybody's arguments."""
        fn, args, kwargs, frame = payloads[0]
        for i, payload in enumerate(payloads):
            if payload[0] is not fn and _code(payload[0]) != _code(fn):
                raise MergeMismatchError(
                    f"replicas met for different things: replica 0 in {self._at(0)} with {fn!r}, "
                    f"replica {i} in {self._at(i)} with {payload[0]!r}; all replicas must make the "
                    "same merge_calls in the same order"
                )
        # The caller's device and replica 0's scopes, as if replica 0 had gone on alone.
        # What it computes is no replica's, so the tape that this thread may have open is paused.
        old = context.enter(frame.but(replica=None, device=self._caller.device, replica_id=0))
        try:
            with stop_recording():
                if args or kwargs:
                    args, kwargs = regroup(
                        [(payload[1], payload[2]) for payload in payloads], devices=self._devices
                    )
                return fn(self.strategy, *args, **kwargs)
        finally:
            context.leave(old)

    def _take_turn(self, i: int, meetings: int) -> None:
        self._turn.wait(meetings * self.n + i)
        self._first_arrival = time.monotonic()  # from now on the others wait for this one
        if self._rendezvous.stopped:
            raise Stopped

    # --- failures

    def _fail(self, failure: BaseException, who: int | None) -> None:
        """Note a failure and wake everyone who waits."""
        with self._lock:
            if self._over:
                return
            if self._failure is None:
                self._failure = failure
                if who is not None and not isinstance(failure, MergeMismatchError):
                    failure.add_note(
                        f"raised in replica {who} of {self.n}, on {self._devices[who].short}"
                    )
            elif failure is not self._failure:
                name = "the caller" if who is None else f"replica {who}"
                what = "".join(traceback.format_exception_only(failure)).strip()
                self._failure.add_note(f"{name} failed too: {what}")
            self._rendezvous.stop()
            self._turn.lift()

    def _unequal(self) -> MergeMismatchError:
        """Return the error for a replica that has finished while another waits for it."""
        rendezvous = self._rendezvous
        waiting = [i for i in range(self.n) if rendezvous.payloads[i] is not None]
        gone = [i for i in range(self.n) if rendezvous.departed[i]]
        code = _code(self._fn)
        where = _place(code, code.co_firstlineno) if isinstance(code, CodeType) else repr(self._fn)
        return MergeMismatchError(
            f"a different number of merge_calls: {_names(gone)} finished {where} after "
            f"{', '.join(str(self._meeting_of[i]) for i in gone)}, while "
            + "; ".join(
                f"replica {i} waits in number {self._meeting_of[i]}, in {self._at(i)}"
                for i in waiting
            )
            + ". Every replica must make the same merge_calls in the same order"
        )

    def _at(self, i: int) -> str:
        position = self._position[i]
        return _place(*position) if position else "no merge_call yet"


def _all_reduce(strategy: Any, op: Any, value: Any) -> Any:
    def to_all(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Mirrored(strategy.devices, [to_device(leaf, device) for device in strategy.devices])

    reduced = strategy.reduce(local_results(op)[0], value)
    return optree.tree_map(to_all, reduced, none_is_leaf=True)


class _Job:
    """What a worker is given to do: be replica `i` of a run."""

    __slots__ = ("i", "run")

    def __init__(self, run: Run, i: int) -> None:
        self.run, self.i = run, i

    def __call__(self) -> None:
        self.run.replica(self.i)


def _names(replicas: Sequence[int]) -> str:
    return ("replica " if len(replicas) == 1 else "replicas ") + ", ".join(map(str, replicas))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame else "  (it has ended)"
