"""Places: where the processes meet that no launcher of MPI's has started, if there is such a place.

    told by hand     the address of worker 0, the first of worker_hosts
    torchrun         MASTER_ADDR, and the port above MASTER_PORT, which is torchrun's own
    srun, no PMI     the first machine of the step, and a port that follows from its number

MINIDIST_PORT is the port of the last two, if it is set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minidist.cluster.environment import SLURM, Environment, Variables
from minidist.cluster.roles import Told
from minidist.errors import ClusterError, UsageError

PORTS = range(20_000, 30_000)  # below those that the system gives to whoever asks for any


@dataclass(frozen=True)
class Place:
    """Where rank 0 waits for the others; the rank of this process; what all are called."""

    address: tuple[str, int]
    rank: int
    names: tuple[str, ...]


def place(said: Environment, told: Told, variables: Variables) -> Place | None:
    """Return where this process meets others, None where it need not.

    Raises UsageError and ClusterError where something is missing that leads there.
    """
    if said.winner is None:
        return _by_hand(told)
    if said.brings_mpi or said.winner.size == 1:
        return None
    winner = said.winner
    find = _of_step if winner.launcher == SLURM.name else _of_torchrun
    names = tuple(f"rank {rank}" for rank in range(winner.size))
    return Place(find(variables), winner.rank, names)


def _by_hand(told: Told) -> Place | None:
    if told.size < 2:
        return None
    if not told.names_all:
        raise UsageError(
            f"worker_hosts and ps_hosts name {told.size} tasks, and no launcher has started this "
            "process as one of several; give job_name and task_index to say which it is, or start "
            "all with mpiexec"
        )
    workers = [f"worker:{task}" for task in range(len(told.worker_hosts))]
    servers = [f"ps:{task}" for task in range(len(told.ps_hosts))]
    host, _, port = told.worker_hosts[0].rpartition(":")
    return Place((host.strip("[]"), int(port)), told.rank, (*workers, *servers))


def _of_torchrun(variables: Variables) -> tuple[str, int]:
    host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT", "")
    if not host:
        raise ClusterError(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR, the machine of rank 0, where the "
            "processes find each other; set it, or start them with mpiexec or torchrun"
        )
    if port and not port.isdecimal():
        raise ClusterError(f"MASTER_PORT={port!r} is no port; give a number, or leave it out")
    return host, _port(variables, int(port) + 1 if port else PORTS[0])


def _of_step(variables: Variables) -> tuple[str, int]:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    host = first_host(nodes)
    if not host:
        raise ClusterError(
            "SLURM_STEP_NODELIST is not set, so the processes of this step do not find each "
            "other; start it with srun --mpi=pmi2, or with mpiexec"
        )
    number = sum(
        int(variables.get(name, "0")) * factor
        for name, factor in (("SLURM_JOB_ID", 1), ("SLURM_STEP_ID", 101))
        if variables.get(name, "0").isdecimal()
    )
    return host, _port(variables, PORTS[number % len(PORTS)])


def first_host(nodes: str) -> str:
    """Return the first name of a list as Slurm writes it: "node[03-05,7],b" begins with node03."""
    first = re.match(r"[^,\[]*(?:\[([^\]]*)\][^,\[]*)*", nodes)
    name = first.group(0) if first else ""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name).strip()


def _port(variables: Variables, otherwise: int) -> int:
    text = variables.get("MINIDIST_PORT")
    if text is None:
        return otherwise
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ClusterError(f"MINIDIST_PORT={text!r} is no port; give a number from 1 to 65535")
    return int(text)
