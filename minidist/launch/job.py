"""Job: one start of all ranks under mpiexec, watched to its end."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minidist.launch import supervisor
from minidist.launch.mpiexec import Host, Mpiexec
from minidist.launch.output import Output
from minidist.launch.ranks import Rank, Ranks
from minidist.launch.supervisor import kill_all_below
from minidist.threads import cores

BRIEFLY = 5.0  # seconds for what ends by itself in a moment, if all is well
MEANWHILE = 0.2  # seconds in which ranks that fail together are heard of
KEPT = 1 << 14  # characters of what mpiexec itself prints: the last ones
# Resource managers from which an mpiexec takes its machines.
MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "COBALT_JOBID", "FLUX_JOB_ID")


@dataclass(frozen=True)
class Plan:
    """What is to be started: a command, so many times, by an mpiexec, on some machines.

    start_timeout: seconds in which all ranks must have started; grace: seconds that ranks have to
    end when they are told to, before they are killed.
    """

    command: Sequence[str]
    count: int
    mpiexec: Mpiexec
    hosts: Sequence[Host] = ()
    start_timeout: float = 60.0
    grace: float = 5.0


@dataclass
class End:
    """How a start has ended: the status to exit with, and whether starting again may help."""

    status: int
    again: bool = False


@dataclass
class _Text:
    """What mpiexec itself has printed, as it comes."""

    parts: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.parts)[-KEPT:].strip()


class Job:
    """One start. news: where signals, as numbers, and broken outputs are told too."""

    def __init__(
        self, plan: Plan, restart: int, news: queue.SimpleQueue[Any], output: Output
    ) -> None:
        self._plan, self._news, self._output = plan, news, output
        local = not plan.hosts and not any(name in os.environ for name in MANAGERS)
        towards = plan.hosts[0].name if plan.hosts else None
        self._ranks = Ranks(plan.count, news, output, local=local, towards=towards)
        environment = {
            "PYTHONUNBUFFERED": "1",  # what a rank prints is seen at once, also if it is killed
            **os.environ,
            **self._ranks.environment,
            "MINIDIST_RESTART": str(restart),
        }
        bare = [sys.executable, "-I", "-S", supervisor.__file__]
        how = plan.mpiexec.command(plan.count, plan.hosts, environment, cores())
        self._mpiexec = subprocess.Popen(
            [*bare, "--tied", str(os.getpid()), *how, *bare, *plan.command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C is for the launcher
        )
        self._text = _Text()
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._await, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        assert self._mpiexec.stdout is not None
        for line in self._mpiexec.stdout:
            self._text.parts.append(line)
            del self._text.parts[:-1000]

    def _await(self) -> None:
        self._mpiexec.wait()
        self._news.put(self._mpiexec)

    def run(self) -> End:
        """Watch all ranks until they have ended; when this returns nothing of them is left."""
        try:
            return self._watch()
        finally:
            self._clear()

    # --- while all is well

    def _watch(self) -> End:
        deadline: float | None = time.monotonic() + self._plan.start_timeout
        while True:
            news = self._next(deadline)
            if isinstance(news, int):
                return self._interrupted(news)
            if isinstance(news, OSError):
                return self._output_broken(news)
            if isinstance(news, Rank) and news.failed:
                return self._failed(news)
            if news is None and self._ranks.missing:
                return self._not_started(f"after {self._plan.start_timeout:g} s")
            if news is self._mpiexec and self._ranks.missing:
                return self._not_started(f"mpiexec has ended with status {self._status}, and")
            if news is None and self._ranks.running:  # mpiexec has ended, or ought to
                lost = self._ranks.running[0]
                lost.lost = True
                return self._failed(lost)
            if not self._ranks.missing and not self._ranks.running:
                if news is self._mpiexec or news is None:
                    return self._ended_well()
                deadline = time.monotonic() + BRIEFLY
            elif news is self._mpiexec:
                deadline = time.monotonic() + BRIEFLY
            elif not self._ranks.missing:
                deadline = None

    def _next(self, deadline: float | None) -> Any:
        """Return what happens next, None where nothing does before the deadline."""
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            return self._news.get(timeout=left)
        except queue.Empty:
            return None

    @property
    def _status(self) -> int:
        status = self._mpiexec.poll() or 0
        return 128 - status if status < 0 else status

    def _ended_well(self) -> End:
        """All ranks have exited with 0; mpiexec may still have found something wrong."""
        status = self._status
        if status:
            self._output.say(
                f"all ranks have exited with status 0, but mpiexec with {status}:\n{self._text}"
            )
        return End(status)

    # --- when it is not

    def _failed(self, first: Rank) -> End:
        sentence = f"{first} {first.how()}"
        also = self._failing_too()
        if also:
            names = ", ".join(str(rank.number) for rank in also)
            sentence += f"; at the same time failed {'rank' if len(also) == 1 else 'ranks'} {names}"
        left = len(self._ranks.running) + len(self._ranks.missing)
        if left:
            sentence += f"; the other {left} are ended" if left > 1 else "; the other is ended"
        self._output.say(sentence)
        self._end_with(signal.SIGTERM)
        return End(first.exit_status, again=True)

    def _failing_too(self) -> list[Rank]:
        """Return ranks that fail at the same time: which of them was the first may be chance."""
        deadline = time.monotonic() + MEANWHILE
        found: list[Rank] = []
        while self._ranks.running:
            news = self._next(deadline)
            if isinstance(news, Rank) and news.failed:
                found.append(news)
            elif not isinstance(news, Rank):
                if news is not None:  # a signal: it is answered in a moment
                    self._news.put(news)
                break
        return sorted(found, key=lambda rank: rank.number)

    def _not_started(self, when: str) -> End:
        missing = self._ranks.missing
        names = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        rank = "rank" if len(missing) == 1 else "ranks"
        have = "has" if len(missing) == 1 else "have"
        self._threads[0].join(1.0)  # all that mpiexec has to say
        self._output.say(
            f"{when} {rank} {names} of {self._ranks.count} {have} not started; "
            f"{self._plan.mpiexec.path} says:\n{str(self._text) or '(nothing)'}"
        )
        status = self._status
        self._end_with(signal.SIGTERM)
        return End(status or 1)

    def _interrupted(self, number: int) -> End:
        self._output.say(f"{signal.Signals(number).name}: all ranks are ended")
        self._end_with(number)
        return End(128 + number)

    def _output_broken(self, failure: OSError) -> End:
        if not isinstance(failure, BrokenPipeError):  # else its reader has left, as `head` does
            self._output.say(f"the output takes no more: {failure}")
        self._end_with(signal.SIGTERM)
        return End(1)

    def _end_with(self, number: int) -> None:
        """Send all ranks a signal; kill those that do not end in time, or at a second Ctrl-C."""
        if self._ranks.missing:
            self._mpiexec.terminate()  # also those that nothing is known of
        self._ranks.signal(number)
        if not self._until_ended(self._plan.grace):
            slow = ", ".join(str(rank) for rank in self._ranks.running)
            self._output.say(f"{slow}: killed, {self._plan.grace:g} s were not enough to end")
            self._ranks.signal(signal.SIGKILL)
            self._until_ended(BRIEFLY)

    def _until_ended(self, seconds: float) -> bool:
        """Wait until no rank runs, for so many seconds or until a signal; say whether none does."""
        deadline = time.monotonic() + seconds
        while self._ranks.running:
            news = self._next(deadline)
            if news is None or isinstance(news, int):
                break
        return not self._ranks.running

    def _clear(self) -> None:
        """Leave nothing behind, whatever has happened."""
        self._ranks.dismiss()
        try:
            self._mpiexec.wait(BRIEFLY)
        except subprocess.TimeoutExpired:
            self._mpiexec.kill()
        kill_all_below()
        for thread in self._threads:
            thread.join(BRIEFLY)
        while not self._news.empty():  # what comes too late is not for the next start
            self._news.get()
