"""Flags of the processes: which there are, and how far apart they may be."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.bench.flags.kinds import BOOLEAN, TEXT, choice, flag, whole
from minidist.cluster.roles import JOBS


@dataclass(frozen=True)
class Processes:
    """The processes of one command, under mpiexec or started one by one."""

    num_ps: int | None = flag(
        None, whole(0, 10_000), "so many of the last processes are parameter servers"
    )
    job_name: str | None = flag(None, choice(*JOBS), "what this process is, where each is told")
    task_index: int | None = flag(None, whole(0, 10_000), "its number in that job")
    worker_hosts: str | None = flag(
        None,
        TEXT,
        "the addresses of all workers, as a:2222,b:2222, for processes that are started one by one",
    )
    ps_hosts: str | None = flag(None, TEXT, "the addresses of all parameter servers")
    cross_replica_sync: bool = flag(
        True,
        BOOLEAN,
        "workers of parameter_server take each step together; else each goes on alone, and its "
        "gradients are applied as they come",
    )
    staleness_bound: int | None = flag(
        None, whole(0), "by how many steps a worker that goes on alone may be ahead of the slowest"
    )
