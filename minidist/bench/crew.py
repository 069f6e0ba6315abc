"""The crew: the processes of one command, which were told the same and end with one status.

Started once, a command is a crew of one. Under mpiexec each rank runs the same program from its
first line to its last; what differs is decided here and nowhere else:

    console       what is printed appears where the chief (worker 0) is, elsewhere it goes nowhere
    own_file      files that every rank writes bear its name, but for the chief's
    exchange      figures of all workers, brought together in all of them
    end           if something went wrong anywhere, all end with its status, and the chief says why

An error so appears once, whatever the number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from minidist.bench.flags import Flags
from minidist.cluster import Cluster, alone, connect, launched
from minidist.comm.peers import Patience, Peers
from minidist.errors import HangError, MinidistError, UsageError
from minidist.patience import DEADLINE, REPORT_AFTER

T = TypeVar("T")

PROGRAM = "minidist.bench"
SOON = 10.0  # seconds in which the others of one that has failed hear of it, and come to the end
OWN = ("job_name", "task_index")  # flags in which ranks may differ


class Ended(NamedTuple):
    """How the command has ended in one process: its exit status, and a sentence if not with 0.

    remove: how far that is from what was wrong: 0 is a failure of its own, 1 an interruption, 2 the
    end of another process.
    """

    status: int = 0
    why: str = ""
    remove: int = 0


class Crew:
    """The processes of this command, seen from one of them; alone until they `join`.

    workers: those that train, as they meet.
    """

    def __init__(self) -> None:
        self.cluster: Cluster = alone()
        self._joined = self._serves = False
        self.workers, self._everyone, self._ending = Peers(), Peers(), Peers()
        self._patience = REPORT_AFTER, DEADLINE

    def join(self, flags: Flags) -> None:
        """Find the others, if there are any, and check that all were given the same flags.

        Raises UsageError where they were not, and what `connect` raises.
        """
        named = bool(flags.worker_hosts or flags.ps_hosts or flags.job_name or flags.num_ps)
        company = _company()
        self._joined = True
        if named or company > 1:
            self._gather(
                connect(
                    flags.num_ps,
                    job_name=flags.job_name,
                    task_index=flags.task_index,
                    worker_hosts=flags.worker_hosts or (),
                    ps_hosts=flags.ps_hosts or (),
                )
            )
        if flags.cross_replica_sync is False:  # workers may be far apart when one has ended
            self._patience = REPORT_AFTER, float("inf")
        self._agree(flags)

    def _gather(self, cluster: Cluster) -> None:
        def patience() -> tuple[float, float]:
            return self._patience

        self.cluster = cluster
        self._everyone = cluster.peers(ranks=sorted((*cluster.workers, *cluster.servers)))
        if cluster.job == "worker":
            self.workers, self._ending = self._group(patience), self._group(patience)

    def _group(self, patience: Patience) -> Peers:
        return self.cluster.peers(patience)

    def _agree(self, flags: Flags) -> None:
        given = {name: value for name, value in flags.config().items() if name not in OWN}
        brought = self._everyone.meet(f"run {PROGRAM}", json.dumps(given).encode())
        every = [json.loads(each) for each in brought]
        for name in given:
            for who, other in zip(self._everyone.names, every, strict=True):
                if other.get(name) != every[0].get(name):
                    raise UsageError(
                        f"--{name} is {every[0].get(name)} in {self._everyone.names[0]} and "
                        f"{other.get(name)} in {who}: give all ranks the same flags"
                    )

    # --- what differs between ranks

    @property
    def names(self) -> Sequence[str]:
        """What the workers are called."""
        return self.workers.names

    @contextmanager
    def console(self) -> Iterator[None]:
        """Let what is printed within a with statement appear once: where the chief is.

        Before the others are found that is the first process by what its launcher says.
        """
        if self.cluster.is_chief if self._joined else _is_first():
            yield
        else:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                yield

    def own_file(self, name: str) -> str:
        """Return the name of a file that every worker writes; the chief's is as it was given."""
        if self.cluster.is_chief:
            return name
        path = Path(name)
        return str(path.with_name(f"{path.stem}.{self.cluster.me.replace(':', '-')}{path.suffix}"))

    def for_chief(self, names: Sequence[str]) -> Sequence[str]:
        """Return names of files that are written once for all: here, or here none."""
        return names if self.cluster.is_chief else ()

    # --- what is done together

    def exchange(self, what: str, item: Any) -> list[Any]:
        """Return what each worker has brought, as JSON has it. All of them must call it."""
        brought = self.workers.meet(what, json.dumps(item).encode())
        return [json.loads(each) for each in brought]

    def chiefs(self, what: str, item: T) -> T:
        """Return what the chief has brought. All workers must call it."""
        chosen: T = self.exchange(what, item)[0]
        return chosen

    def serve(self) -> None:
        """Be a parameter server until the workers have ended."""
        self._serves = True
        self.cluster.serve()

    def fail(self, failure: BaseException) -> None:
        """Tell those who wait for this process that it has failed."""
        self._everyone.fail(failure)
        self.workers.fail(failure)

    def end(self, own: Ended) -> int:
        """Return the status with which all processes end, and let the chief say why.

        That is of what has failed first of itself, by the number of the worker.
        """
        if own.status and not self._joined:
            self._find_others(own)
        names, silent = self._ending.names, False
        if own.status and self._patience[1] < math.inf:  # workers in step: who is well comes soon
            self._patience = math.inf, SOON
        try:
            told = self._ending.meet(f"end {PROGRAM}", json.dumps(own).encode())
            speaks = self.cluster.is_chief or (self._serves and own.remove == 0)
        except MinidistError as failure:  # some rank has ended in another way, or is silent
            silent = isinstance(failure, HangError)
            told, names, speaks = [json.dumps(own).encode()], (self.cluster.me,), True
        ended = [(name, Ended(*json.loads(each))) for name, each in zip(names, told, strict=True)]
        failed = [(name, each) for name, each in ended if each.status]
        if not failed:
            return 0
        nearest = min(each.remove for _, each in failed)
        causes = [(name, each) for name, each in failed if each.remove == nearest]
        if speaks:
            _say(causes, len(ended))
        if silent and self.cluster.engine is not None:  # it would not come to the end of MPI either
            sys.stdout.flush()
            self.cluster.engine.abort(causes[0][1].status)
        return causes[0][1].status

    def _find_others(self, own: Ended) -> None:
        """Join those who were told what this process could not understand, or who could not too."""
        try:
            if _company() > 1:
                self._gather(connect())
                self.fail(MinidistError(own.why))
        except MinidistError:
            pass


def _company() -> int:
    """Return how many processes a launcher has started, this one with them."""
    winner = launched().winner
    return 1 if winner is None else winner.size


def _is_first() -> bool:
    """Whether this is the first of them."""
    winner = launched().winner
    return winner is None or winner.rank == 0


def _say(causes: Sequence[tuple[str, Ended]], of: int) -> None:
    """Print why the command has ended; with a name where it was not so everywhere."""
    by_why: dict[str, list[str]] = {}
    for name, ended in causes:
        by_why.setdefault(ended.why, []).append(name)
    for why, names in by_why.items():
        if why:
            who = "" if len(names) == of else f"{', '.join(names)}: "
            print(f"{PROGRAM}: {who}{why}", file=sys.stderr)
