"""Connect: from what the launcher, MPI and the caller say to one Cluster, the same in all ranks."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec

from minidist import threads
from minidist.cluster import environment
from minidist.cluster.cluster import Cluster, alone
from minidist.cluster.ending import Ending
from minidist.cluster.environment import SLURM, Environment
from minidist.cluster.line import Line
from minidist.cluster.places import place
from minidist.cluster.roles import Told, addresses, assign
from minidist.comm.mpi import Engine
from minidist.errors import ClusterError, MinidistError, UsageError

REFUSAL = b"!"  # before the reason why a rank takes no part

_connected: tuple[Cluster, Told] | None = None
_refused: Engine | None = None


def connected() -> Cluster | None:
    """Return what `connect` has returned in this process, None where it was not called."""
    return None if _connected is None else _connected[0]


def connect(
    num_ps: int | None = None,
    *,
    job_name: str | None = None,
    task_index: int | None = None,
    worker_hosts: str | Iterable[str] = (),
    ps_hosts: str | Iterable[str] = (),
) -> Cluster:
    """Start MPI and return this process's cluster; the same one whenever called again.

    num_ps: so many of the last ranks are parameter servers; by default none.
    job_name, task_index: who this process is, "worker" or "ps" and its number in that job.
    worker_hosts, ps_hosts: the addresses of all tasks, as "a:2222,b:2222". With all four, processes
        find each other that no launcher has started: at the address of worker 0.

    A process that nobody has started as one of several is a cluster of one. Called again without
    arguments, it takes what there is.
    Raises ClusterError where MPI is missing or sees other processes than the launcher has started,
    and where launchers contradict each other; UsageError where ranks were told what does not fit
    together, or this one something else before.
    """
    global _connected
    said = launched()
    try:
        told = Told(num_ps, job_name, task_index, addresses(worker_hosts), addresses(ps_hosts))
    except UsageError as failure:
        _refuse(failure)
        raise
    if _connected is not None:
        cluster, before = _connected
        if told not in (Told(), before, Told(num_ps=len(cluster.servers))):
            raise UsageError(
                f"connect was called with {before} before, and now with {told}; call it once"
            )
        return cluster
    _connected = (_connect(told, said), told)
    return _connected[0]


def launched() -> Environment:
    """Return what this process's launcher says of it.

    Raises ClusterError where that contradicts itself; other processes hear of it too.
    """
    try:
        return environment.read(os.environ)
    except ClusterError as failure:
        _refuse(failure)
        raise


def _refuse(failure: MinidistError) -> None:
    """Tell the other processes, which MPI lets wait for this one, why it takes no part."""
    global _refused
    if _refused is None and any(name in os.environ for name in environment.MPI_VARIABLES):
        with suppress(MinidistError):  # without MPI there is nobody to tell
            _refused = Engine(brought=REFUSAL + str(failure).encode())


def _connect(told: Told, said: Environment) -> Cluster:
    where = place(said, told, os.environ)
    if where is None and said.winner is None and told.job_name is not None:
        raise UsageError(
            f"job_name={told.job_name} is said of one process of several, but no launcher has "
            "started it; give worker_hosts and task_index too, or start it with mpiexec"
        )
    if where is None and said.winner is None and find_spec("mpi4py") is None:
        assign([told], ["this machine"])
        return alone()
    line = None if where is None else Line(where.address, where.rank, where.names)
    cores = frozenset(threads.allowed())
    engine = Engine(
        brought=told.to_json() + b"\n" + ",".join(map(str, sorted(cores))).encode(),
        prepare=None if line is None else line.lead_mpi,
    )
    if line is not None:
        line.follow(engine.close, engine.has_ended)
    for rank, each in enumerate(engine.brought):
        if each.startswith(REFUSAL):
            why = each.removeprefix(REFUSAL).decode()
            raise ClusterError(f"rank {rank} (on {engine.hosts[rank]}) takes no part: {why}")
    _check_seen(engine, said)
    ending = Ending(engine, f"rank {engine.rank}") if engine.size > 1 else None
    brought = [each.split(b"\n") for each in engine.brought]
    workers, servers = assign([Told.from_json(text) for text, _ in brought], engine.hosts)
    cluster = Cluster(engine, workers, servers)
    if ending is not None:
        ending.name = f"{cluster.me} on {engine.hosts[engine.rank]}"
        atexit.register(cluster.leave)
    mates = [
        frozenset(map(int, brought[rank][1].decode().split(",")))
        for rank in (workers if cluster.job == "worker" else servers)
        if engine.hosts[rank] == engine.hosts[engine.rank]
    ]
    threads.divide(cores, mates)
    return cluster


def _check_seen(engine: Engine, said: Environment) -> None:
    """Check that MPI sees the processes that the launcher has started."""
    winner = said.winner
    if winner is None or (engine.rank, engine.size) == (winner.rank, winner.size):
        return
    if winner.launcher == SLURM.name:
        cure = (
            "choose how srun brings this MPI's processes together (srun --mpi=list), or "
            "--mpi=none, with which they find each other by themselves"
        )
    else:
        cure = "start it with the mpiexec of this MPI, which python -m minidist.doctor names"
    raise ClusterError(
        f"{winner.launcher} has started this process as rank {winner.rank} of {winner.size}, but "
        f"MPI here ({engine.implementation}) sees rank {engine.rank} of {engine.size}; {cure}"
    )
