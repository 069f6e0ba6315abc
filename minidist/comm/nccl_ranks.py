"""NcclRanks: this process's ranks of one NCCL communicator, which give it work together.

    look at the names, meet, join                              once, when they are made
    group( rank 0: calls   rank 1: calls   … )  ─► settled     for everything they do
    whoever waits for one of the streams looks ─► failed?      in between
    finish, free                                               once, at the end

One thread at a time gives work, that of all ranks here in one group, on each device's communication
stream. NCCL takes it without waiting for anybody; until it has, nothing else is given to these
streams. Nothing waits without a deadline: a rank that does not come, an error that NCCL reports
later, and a peer that says that it has failed all end in an abort, which a thread of its own does,
since that may block too. Then kernels that wait for other ranks end, and so do the streams' waits.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

from minidist import context, observe
from minidist.comm.aside import Progress, aside
from minidist.comm.nccl_library import IN_PROGRESS, READY, Library
from minidist.comm.nccl_teams import Teams
from minidist.comm.peers import Peers
from minidist.device import Array, Event
from minidist.errors import HangError, MinidistError, PeerError, UsageError
from minidist.patience import Waiting

log = logging.getLogger("minidist")

ABORT = 5.0  # seconds that NCCL has to abort, before its thread is left behind
MOST_BLOCKS = 32  # thread blocks that ranks of one GPU take together: all must run at once

Give = Callable[[int, Any, int], None]  # is given a rank here, its handle and its stream


class Flight(NamedTuple):
    """What was given: of what kind, and the events of having done it."""

    what: str
    events: Sequence[Event]


class NcclRanks:
    """The ranks of this process, one for each team, on its speaker's device.

    peers: all processes, which must make it at the same time. members: those of them that take
    part with this one; each member must be given the same.
    counts: the ranks of each member. first: the number of the first one here. of: for each replica
    of all members the number of its team's rank.
    Raises UsageError where NCCL cannot be had so, PeerError and HangError where it fails.
    """

    def __init__(
        self, library: Library, teams: Teams, peers: Peers, members: Sequence[int]
    ) -> None:
        self.devices: tuple[Any, ...] = teams.speakers
        self.nccl = library
        self._peers = peers
        self._lock = threading.RLock()  # of who gives work
        self._handling = threading.Lock()  # of who uses the handles
        self._handles: list[Any] = []
        self._under: deque[Flight] = deque()
        self._reported: Flight | None = None
        self._broken: BaseException | None = None
        self._broken_at = 0.0
        self._closed = False
        met = self._meet(members, teams)
        self.counts = [len(each["gpus"]) for each in met]
        starts = list(accumulate(self.counts, initial=0))
        self.first = starts[list(members).index(peers.me)]
        pairs = zip(starts, met, strict=False)
        self.of = [start + number for start, each in pairs for number in each["of"]]
        name = bytes.fromhex(met[0]["name"])
        self._join(name)
        for device in self.devices:
            stream: Any = device.stream("communication")
            stream.watchers.add(self)

    @property
    def count(self) -> int:
        """How many ranks there are, with those of other processes."""
        return sum(self.counts)

    # --- the beginning

    def _meet(self, members: Sequence[int], teams: Teams) -> list[dict[str, Any]]:
        """Return what each member says, the first the name of the new communicator."""
        peers, library = self._peers, self.nccl
        gpus = [device.uuid for device in self.devices]
        own = {
            "name": "",
            "failure": "",
            "version": library.version,
            "words": library.words,
            "gpus": gpus,
            "of": teams.of,
        }
        if peers.me == members[0]:
            try:
                own["name"] = library.new_id().hex()
            except Exception as failure:  # which the others shall know
                own["failure"] = f"NCCL cannot begin in {peers.names[peers.me]}: {failure}"
        met = peers.meet("make an NCCL communicator", json.dumps(own).encode())
        every = [json.loads(met[member]) for member in members]
        if every[0]["failure"]:
            raise PeerError(every[0]["failure"])
        versions = {each["version"] for each in every}
        if len(versions) > 1:
            said = ", ".join(
                f"{peers.names[member]} has {each['words']}"
                for member, each in zip(members, every, strict=True)
            )
            raise UsageError(f"nccl needs one version of NCCL in all processes, and {said}")
        who: dict[tuple[str, str], list[str]] = {}
        for member, each in zip(members, every, strict=True):
            for gpu in each["gpus"]:
                who.setdefault((peers.hosts[member], gpu), []).append(peers.names[member])
        self._most = max(map(len, who.values()))  # ranks of one GPU
        if self._most > 1 and not library.several:
            names = next(names for names in who.values() if len(names) > 1)
            raise UsageError(
                f"nccl: {' and '.join(names)} share a GPU, which takes NCCL 2.30 or newer with "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 and a driver for CUDA 12.3 or newer, and this is "
                f"{library.words}; give each process a GPU of its own, or use auto"
            )
        return every

    def _join(self, name: bytes) -> None:
        most_blocks = max(1, MOST_BLOCKS // self._most)

        def join() -> None:
            with self.nccl.group():
                for rank, device in enumerate(self.devices, self.first):
                    with device.gpu:
                        joined = self.nccl.join(name, self.count, rank, most_blocks)
                    self._handles.append(joined)

        what = f"join the {self.count} ranks of an NCCL communicator"
        try:
            waiting = Waiting(*self._peers.patience())
            for _ in aside("nccl-join", [join], waiting, lambda: self._late(what)):
                self._check(what)
            self._settle(what)
        except BaseException as failure:
            self._fail(failure, what)

    # --- work

    def give(
        self,
        what: str,
        reads: Sequence[Sequence[Array]],
        writes: Sequence[Sequence[Array]],
        call: Give,
    ) -> None:
        """Let every rank here make its calls, in one group, on its communication stream.

        what: in words. reads, writes: for each rank here the arrays that NCCL will read and write.
        Raises PeerError where NCCL fails, or has failed before, HangError where it does not take
        the work in time.
        """
        with self._lock:
            self._require_whole(what)
            try:
                with ExitStack() as held:
                    streams: dict[int, Any] = {}
                    # All threads take the streams in one order, whatever that of the ranks is.
                    for rank in sorted(
                        range(len(self.devices)), key=lambda k: self.devices[k].short
                    ):
                        device = self.devices[rank]
                        stream = held.enter_context(device.giving(device.stream("communication")))
                        streams[rank] = stream
                        for block in {array.data.mem.block for array in reads[rank]}:
                            block.read(stream)
                        for block in {array.data.mem.block for array in writes[rank]}:
                            block.write(stream)
                        held.enter_context(
                            observe.piece(stream, f"nccl {what}", reads[rank], writes[rank])
                        )
                    with self.nccl.group():
                        for rank, handle in enumerate(self._handles):
                            call(rank, handle, streams[rank].raw.ptr)
                    self._settle(what)
            except BaseException as failure:
                self._fail(failure, what)
            self._under.append(Flight(what, [streams[k].record() for k in sorted(streams)]))
            self._forget_done()

    def _settle(self, what: str) -> None:
        """Wait until NCCL is ready for the next call, which is when it has begun this one."""
        progress = Progress(self._states)
        if progress.value:
            return
        waiting = Waiting(*self._peers.patience())
        while not progress.value:
            self._check(what)
            waiting.tick(progress, 1, lambda: self._late(what))

    def _check(self, what: str) -> None:
        """Raise what ends a wait: that this thread's run has ended, or a peer has failed."""
        run = context.frame().run
        if run is not None:
            run.check()
        self._peers.check(what)

    def _states(self) -> bool:
        """Whether NCCL is ready; raises PeerError where something has gone wrong."""
        with self._handling:
            results = [self.nccl.state(handle) for handle in self._handles]
        for rank, result in enumerate(results, self.first):
            if result not in (READY, IN_PROGRESS):
                raise PeerError(
                    f"NCCL says of rank {rank} of {self.count}, on "
                    f"{self.devices[rank - self.first].short}: {self.nccl.said(result)}"
                )
        return IN_PROGRESS not in results

    def _late(self, what: str) -> str:
        names = ", ".join(device.short for device in self.devices)
        return f"NCCL has not come to {what} with {names}: another rank may not have come"

    def _require_whole(self, what: str) -> None:
        if self._closed:
            raise PeerError(f"NCCL cannot {what}: its communicator was closed")
        if self._broken is not None:
            raise self._out_of_step() from self._broken
        try:
            self._states()
        except Exception as failure:
            self._fail(failure, what)

    def _out_of_step(self) -> PeerError:
        return PeerError(
            f"NCCL was aborted since: {type(self._broken).__name__}: {self._broken}; make a new "
            "strategy"
        )

    # --- looking after it

    def look(self, waited: float, timeout: float) -> None:
        """Raise what has gone wrong with what is under way; see Watcher.

        Its deadline is the patience that peers have with each other, if that ends before.
        """
        if self._broken is not None:
            if waited > time.monotonic() - self._broken_at:  # it was waited for while it failed
                raise self._out_of_step() from self._broken
            return
        holding = self._lock.acquire(blocking=False)
        if not holding and not self.nccl.blocking:
            return  # who gives work now looks too; who is blocked in doing so cannot
        try:
            self._look(waited, timeout)
        finally:
            if holding:
                self._lock.release()

    def _look(self, waited: float, timeout: float) -> None:
        if self._closed or not self._under:
            return
        flight = self._under[0]
        report_after, deadline = self._peers.patience()
        try:
            self._states()
            self._peers.check(flight.what)
            self._forget_done()
            if not self._under or self._under[0] is not flight:
                return
            if waited > min(timeout, deadline):
                raise HangError(f"for {waited:.1f} s {self._late_flight(flight)}")
            if waited > report_after and self._reported is not flight:
                self._reported = flight
                log.warning("for %.1f s %s", waited, self._late_flight(flight))
        except Exception as failure:
            self._fail(failure, f"end the {flight.what}")

    def _late_flight(self, flight: Flight) -> str:
        names = ", ".join(device.short for device in self.devices)
        return (
            f"the {flight.what} that NCCL was given with {names} has not ended: another rank may "
            "not have come to it, or what it reads is not there yet"
        )

    def _forget_done(self) -> None:
        while self._under and all(event.done() for event in self._under[0].events):
            self._under.popleft()

    # --- the end

    def _fail(self, failure: BaseException, what: str) -> NoReturn:
        """Abort, and raise the failure, in words if it is one of NCCL's own."""
        error = failure
        if isinstance(failure, Exception) and not isinstance(failure, MinidistError):
            error = PeerError(f"NCCL cannot {what}: {failure}")
        self._abort(error)
        if error is failure:
            raise failure
        raise error from failure

    def _abort(self, error: BaseException) -> None:
        with self._handling:
            first, self._broken = self._broken is None, self._broken or error
            handles, self._handles = self._handles, []
        if first:
            self._broken_at = time.monotonic()
            self._peers.fail(error)
        self._under.clear()
        self._let_go(handles, self.nccl.abort, "abort")

    def close(self) -> None:
        """Wait for what is under way, and leave. Closing twice is fine.

        What goes wrong then is logged, and ends in an abort.
        """
        with self._lock:
            if self._closed or self._broken is not None:
                self._closed = True
                return
            try:
                if not self._peers.whole:
                    raise PeerError("this process or another one has failed")
                for flight in list(self._under):
                    for event in flight.events:
                        event.wait(self._peers.patience()[1])
                with self.nccl.group():
                    for handle in self._handles:
                        self.nccl.finish(handle)
                self._settle("leave an NCCL communicator")
            except Exception as failure:
                if self._broken is None:
                    self._abort(failure)
                log.warning("NCCL was aborted when it was to be closed: %s", failure)
            self._closed = True
            with self._handling:
                handles, self._handles = self._handles, []
        self._let_go(handles, self.nccl.free, "free")

    def _let_go(self, handles: Sequence[Any], call: Callable[[Any], None], verb: str) -> None:
        """Make a call for all handles at the same time: each may wait for the others'."""
        calls = [partial(call, handle) for handle in handles]
        waiting = Waiting(ABORT, ABORT)
        try:
            for _ in aside(f"nccl-{verb}", calls, waiting, lambda: f"NCCL did not {verb}"):
                pass
        except Exception as failure:
            log.warning("%s; threads that wait for it are left behind", failure)
