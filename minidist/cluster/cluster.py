"""Cluster: the ranks and their jobs. Workers compute; ps (parameter servers) hold variables.

Rank is the number of a process among all, task that among those of its job.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from minidist.comm.mpi import Engine
from minidist.comm.peers import Patience, Peers, Ranks
from minidist.errors import UsageError

CHANNELS = 1024  # of one cluster: of each group of ranks that meet


class Cluster:
    """Some ranks in their roles, seen from one of them.

    job: "worker" or "ps"; task: this process's number in its job. rank, size: its number among all
    processes, and their count. workers, servers: the ranks of both jobs in the order of tasks.
    """

    def __init__(
        self,
        engine: Engine | None,
        workers: Sequence[int],
        servers: Sequence[int] = (),
        number: int = 0,
    ) -> None:
        self.engine = engine
        self.rank = 0 if engine is None else engine.rank
        self.workers = tuple(workers)
        self.servers = tuple(servers)
        self.number = number
        self._channels = itertools.count(1)
        self._parts = itertools.count(1)

    @property
    def size(self) -> int:
        return len(self.workers) + len(self.servers)

    @property
    def job(self) -> str:
        return "ps" if self.rank in self.servers else "worker"

    @property
    def task(self) -> int:
        return (self.servers if self.rank in self.servers else self.workers).index(self.rank)

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which writes what is written once for all."""
        return self.rank == self.workers[0]

    def name(self, rank: int) -> str:
        """Return what a rank is called, as "worker:0"."""
        if rank in self.servers:
            return f"ps:{self.servers.index(rank)}"
        return f"worker:{self.workers.index(rank)}"

    @property
    def me(self) -> str:
        """What this process is called."""
        return self.name(self.rank)

    def channel(self) -> int:
        """Return the number of a new channel: the same in all ranks that ask in the same order."""
        return self.number * CHANNELS + next(self._channels)

    def peers(self, patience: Patience | None = None, ranks: Sequence[int] | None = None) -> Peers:
        """Return a new group of ranks that meet, all workers by default.

        All of them must ask for it, in the same order as for other groups.
        """
        ranks = self.workers if ranks is None else ranks
        channel = self.channel()
        if self.engine is None or len(ranks) == 1:
            return Peers()
        names = [self.name(rank) for rank in ranks]
        how: dict[str, Any] = {} if patience is None else {"patience": patience}
        return Ranks(self.engine, channel, ranks, names, **how)

    def part(self, workers: Sequence[int], servers: Sequence[int] = ()) -> Cluster:
        """Return a cluster of only some ranks. All ranks must ask, also those not in it."""
        return Cluster(self.engine, workers, servers, self.number * 256 + next(self._parts))

    def __repr__(self) -> str:
        return (
            f"<Cluster of {len(self.workers)} workers and {len(self.servers)} ps, as {self.me}>"
        )


def alone() -> Cluster:
    """Return the cluster of one process, for which MPI is not started."""
    return Cluster(None, (0,))


_connected: tuple[Cluster, int] | None = None


def connected() -> Cluster | None:
    """Return what `connect` has returned in this process, None where it was not called."""
    return None if _connected is None else _connected[0]


def connect(num_ps: int = 0) -> Cluster:
    """Start MPI and return this process's cluster; the same one whenever called again.

    num_ps: so many of the last ranks are parameter servers.
    Raises ClusterError where MPI is missing, UsageError where no worker would be left, and where it
    was called with another number before.
    """
    global _connected
    if _connected is not None:
        if _connected[1] != num_ps:
            raise UsageError(
                f"connect was called with num_ps={_connected[1]} before, and now with {num_ps}"
            )
        return _connected[0]
    engine = Engine()
    if not 0 <= num_ps < engine.size:
        raise UsageError(
            f"num_ps={num_ps} of {engine.size} processes leaves no worker; start more processes"
        )
    workers = engine.size - num_ps
    _connected = (Cluster(engine, range(workers), range(workers, engine.size)), num_ps)
    return _connected[0]
