"""Cluster: the ranks and their jobs. Workers compute; ps (parameter servers) hold variables.

Rank is the number of a process among all, task that among those of its job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from weakref import WeakSet

from minidist.cluster.calls import Line
from minidist.comm.mpi import Engine
from minidist.comm.peers import Patience, Peers, Ranks, ended
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
        self._groups: WeakSet[Peers] = WeakSet()  # those that somebody may still use
        self._lines: list[Line] | None = None
        self._left = False

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
            return Peers(patience)
        names = [self.name(rank) for rank in ranks]
        peers = Ranks(self.engine, channel, ranks, names, patience)
        self._groups.add(peers)
        return peers

    def part(self, workers: Sequence[int], servers: Sequence[int] = ()) -> Cluster:
        """Return a cluster of only some ranks. All ranks must ask, also those not in it."""
        part = Cluster(self.engine, workers, servers, self.number * 256 + next(self._parts))
        part._groups = self._groups  # so that all are left together
        return part

    def leave(self) -> None:
        """Tell all that wait for this rank, or will, that it takes no further part.

        A ps serves until all workers have said so. A process says it when it ends; of a part of a
        cluster that ends before, its workers must.
        """
        if self._left or (self.engine is not None and not self.engine.runs):
            return
        self._left = True
        for peers in list(self._groups):
            peers.leave()
        if self.engine is not None and self.number == 0:  # the whole job
            for rank in range(self.engine.size):
                if rank != self.rank:
                    self.engine.notify(rank, ended())
        if self.job == "worker":
            for line in self.lines:
                line.leave()

    # --- parameter servers

    @property
    def call_channel(self) -> int:
        """The number of the channel over which workers call ps; of no group that meets."""
        return self.number * CHANNELS

    @property
    def lines(self) -> list[Line]:
        """The ways from this worker to each ps."""
        if self._lines is None:
            assert self.engine is not None or not self.servers
            self._lines = [
                Line(self.engine, rank, self.call_channel) for rank in self.servers if self.engine
            ]
        return self._lines

    def serve(self) -> None:
        """Hold variables for the workers, in a ps, until all of them have left.

        Raises UsageError in a worker.
        """
        if _service is None:
            raise UsageError("import minidist as a whole, which brings what a ps does")
        _service(self)

    def __repr__(self) -> str:
        return f"<Cluster of {len(self.workers)} workers and {len(self.servers)} ps, as {self.me}>"


_service: Callable[[Cluster], None] | None = None


def set_service(service: Callable[[Cluster], None]) -> None:
    """Install what a ps does (minidist does, with minidist.server)."""
    global _service
    _service = service


def alone() -> Cluster:
    """Return the cluster of one process, for which MPI is not started."""
    return Cluster(None, (0,))
