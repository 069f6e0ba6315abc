"""Roles: which ranks are workers and which are parameter servers.

Either the processes are told how many of them are ps, and the last ranks are it:

    connect(num_ps=1)

or each is told who it is, as by the ancestor's flags of the same names:

    connect(job_name="worker", task_index=1, worker_hosts="a:2222,b:2222", ps_hosts="c:2222")

Every rank says what it was told, and `assign` finds what follows for all, or who contradicts whom.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minidist.errors import UsageError

JOBS = ("worker", "ps")


@dataclass(frozen=True)
class Told:
    """What a process was told of its role. None and () are what it was not told.

    worker_hosts and ps_hosts: the addresses of both jobs' tasks, as "host:port".
    """

    num_ps: int | None = None
    job_name: str | None = None
    task_index: int | None = None
    worker_hosts: tuple[str, ...] = ()
    ps_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_ps is not None and self.num_ps < 0:
            raise UsageError(f"num_ps={self.num_ps} is less than no parameter server")
        if self.job_name is not None and self.job_name not in JOBS:
            raise UsageError(f"job_name={self.job_name!r} is no job: there are worker and ps")
        if self.task_index is not None and self.job_name is None:
            raise UsageError(
                f"task_index={self.task_index} needs a job_name: say worker or ps beside it"
            )
        if self.ps_hosts and not self.worker_hosts:
            raise UsageError("ps_hosts needs worker_hosts: a job has at least one worker")
        if self.num_ps is not None and (self.job_name is not None or self.worker_hosts):
            raise UsageError(
                f"num_ps={self.num_ps} and job_name, ps_hosts or worker_hosts are two ways to say "
                "the same: give one of them"
            )
        addresses = self.worker_hosts + self.ps_hosts
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise UsageError(f"{address!r} in worker_hosts or ps_hosts is no host:port")
            if addresses.count(address) > 1:
                raise UsageError(
                    f"{address} is twice in worker_hosts and ps_hosts: every task is a process of "
                    "its own, with a port of its own"
                )
        if self.worker_hosts and self.job_name is not None and self.task_index is not None:
            count = len(self.worker_hosts if self.job_name == "worker" else self.ps_hosts)
            if not 0 <= self.task_index < count:
                raise UsageError(
                    f"task_index={self.task_index} is not among the {count} {self.job_name} tasks "
                    f"of {self.job_name}_hosts, which are numbered from 0"
                )

    @property
    def names_all(self) -> bool:
        """Whether it was told all that a process needs which no launcher has started."""
        return bool(self.worker_hosts) and self.job_name is not None and self.task_index is not None

    @property
    def rank(self) -> int:
        """The rank of who `names_all`: first the workers, then the ps."""
        assert self.task_index is not None
        return self.task_index + (len(self.worker_hosts) if self.job_name == "ps" else 0)

    @property
    def size(self) -> int:
        """The number of processes where addresses were told."""
        return len(self.worker_hosts) + len(self.ps_hosts)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Told:
        fields: dict[str, Any] = json.loads(text)
        for name in ("worker_hosts", "ps_hosts"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def addresses(hosts: str | Iterable[str]) -> tuple[str, ...]:
    """Return addresses that are given as "a:1,b:2", or one by one."""
    parts = hosts.split(",") if isinstance(hosts, str) else hosts
    return tuple(part.strip() for part in parts if part.strip())


def assign(told: Sequence[Told], hosts: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the workers and of the ps, in the order of their tasks.

    told: what each rank was told; hosts: the name of its machine, for errors.
    Raises UsageError that names the ranks where they contradict each other.
    """
    size = len(told)

    def who(ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} (on {hosts[rank]})" for rank in ranks)

    def same(name: str) -> None:
        by_value: dict[object, list[int]] = {}
        for rank, each in enumerate(told):
            by_value.setdefault(getattr(each, name), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(f"{value!r} to {who(ranks)}" for value, ranks in by_value.items())
            raise UsageError(f"all processes must be given the same {name}, but there is {said}")

    for name in ("num_ps", "worker_hosts", "ps_hosts"):
        same(name)
    first = told[0]
    if first.worker_hosts and first.size != size:
        raise UsageError(
            f"worker_hosts and ps_hosts name {first.size} tasks, but {size} processes were started"
        )
    without = [rank for rank in range(size) if told[rank].job_name is None]
    if len(without) == size:
        num_ps = len(first.ps_hosts) if first.num_ps is None else first.num_ps
        if num_ps >= size:
            raise UsageError(
                f"num_ps={num_ps} of {size} processes leaves no worker; start more processes"
            )
        return tuple(range(size - num_ps)), tuple(range(size - num_ps, size))
    if without:
        raise UsageError(f"job_name is given to other processes, but not to {who(without)}")
    workers, servers = (_tasks(job, told, who) for job in JOBS)
    if not workers:
        raise UsageError(f"job_name=ps was given to all {size} processes, so none is a worker")
    if first.worker_hosts and len(workers) != len(first.worker_hosts):
        raise UsageError(
            f"worker_hosts names {len(first.worker_hosts)} tasks, but job_name=worker was given to "
            f"{len(workers)} processes: {who(workers)}"
        )
    return workers, servers


def _tasks(job: str, told: Sequence[Told], who: Callable[[Iterable[int]], str]) -> tuple[int, ...]:
    """Return the ranks of a job by task: as they say, or in their own order if none does."""
    ranks = [rank for rank in range(len(told)) if told[rank].job_name == job]
    by_task: dict[int, list[int]] = {}
    silent = []
    for rank in ranks:
        task = told[rank].task_index
        if task is None:
            silent.append(rank)
        else:
            by_task.setdefault(task, []).append(rank)
    if len(silent) == len(ranks):
        return tuple(ranks)
    if silent:
        raise UsageError(f"task_index is given to other {job}s, but not to {who(silent)}")
    for task, claimants in by_task.items():
        if len(claimants) > 1:
            raise UsageError(f"{job}:{task} is what several processes were told: {who(claimants)}")
    missing = [task for task in range(len(ranks)) if task not in by_task]
    if missing:
        raise UsageError(
            f"of {len(ranks)} {job} processes none is {job}:{missing[0]}; their task_index must be "
            f"0 to {len(ranks) - 1}, and is {', '.join(map(str, sorted(by_task)))}"
        )
    return tuple(by_task[task][0] for task in sorted(by_task))
