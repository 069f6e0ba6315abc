"""The environment: what a launcher has told this process of its place among all.

Each launcher sets variables of its own for the processes that it starts. They are read in this
order, and the first that says something wins:

    torchrun     RANK WORLD_SIZE                                 (or who sets them by hand)
    Open MPI     OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE
    MPICH        PMI_RANK PMI_SIZE                               (Intel MPI, and srun's PMI)
    Slurm        SLURM_PROCID SLURM_STEP_NUM_TASKS               (in a step of srun)

Who says something else than the winner is a contradiction, and an error. Only Slurm may: where
torchrun or an mpiexec were started by srun or in a batch script, its variables are about *them*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minidist.errors import ClusterError

Variables = Mapping[str, str]


@dataclass(frozen=True)
class Said:
    """What one launcher says: `rank` of `size` processes."""

    launcher: str
    rank: int
    size: int
    variables: tuple[str, ...]  # those that say it

    def __str__(self) -> str:
        return f"{self.launcher} says rank {self.rank} of {self.size}"


@dataclass(frozen=True)
class Environment:
    """Who won, None where nobody has started this process; and what was left out, and why."""

    winner: Said | None
    agreeing: tuple[Said, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # who or what, and why
    brings_mpi: bool = False  # a launcher waits for MPI's processes to bring them together
    variables: Variables = field(default_factory=dict, repr=False)

    @property
    def why(self) -> str:
        """In a sentence, why this one has won."""
        if self.winner is None:
            return "no launcher's variables are set, so this process was started alone"
        names = ", ".join(f"{name}={self.variables[name]}" for name in self.winner.variables)
        others = " and ".join(said.launcher for said in self.agreeing)
        return f"{self.winner}: {names}{f'; {others} agrees' if others else ''}"


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    sizes: tuple[str, ...]  # the first that is set counts


TORCHRUN = _Launcher("torchrun", "RANK", ("WORLD_SIZE",))
OPEN_MPI = _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",))
MPICH = _Launcher("MPICH's mpiexec", "PMI_RANK", ("PMI_SIZE",))
SLURM = _Launcher("Slurm's srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
ORDER = (TORCHRUN, OPEN_MPI, MPICH, SLURM)
# One of these is set where an MPI's own launcher, or Slurm's stand-in for one, serves this process.
MPI_VARIABLES = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def read(variables: Variables) -> Environment:
    """Return what the variables of a process say.

    Raises ClusterError where they contradict each other, or are no such numbers.
    """
    said: list[Said] = []
    left_out: list[tuple[str, str]] = []
    for launcher in ORDER:
        if launcher.rank not in variables:
            continue
        size = next((name for name in launcher.sizes if name in variables), None)
        if size is None:
            left_out.append((launcher.rank, f"{launcher.sizes[0]} is not set beside it"))
        else:
            said.append(_said(launcher, size, variables))
    reason = _about_others(said, variables)
    if reason is not None:
        left_out.append((f"{said[-1]}", reason))
        said = said[:-1]
    for other in said[1:]:
        _check_agree(said[0], other, variables)
    return Environment(
        winner=said[0] if said else None,
        agreeing=tuple(said[1:]),
        left_out=tuple(left_out),
        brings_mpi=any(name in variables for name in MPI_VARIABLES),
        variables=variables,
    )


def _said(launcher: _Launcher, size: str, variables: Variables) -> Said:
    name = launcher.name
    if launcher is TORCHRUN and "TORCHELASTIC_RUN_ID" not in variables:
        name = "whoever has set RANK"
    elif launcher is MPICH and "MPI_LOCALRANKID" not in variables:
        name = "a launcher with PMI"  # as srun --mpi=pmi2
    used = [launcher.rank, size]
    rank, count = (_number(variables, each) for each in used)
    if not rank < count:
        raise ClusterError(
            f"{launcher.rank}={rank} and {size}={count}, set by {name}, do not fit: ranks are from "
            "0 to the size - 1. Unset both where nothing has started this process"
        )
    return Said(name, rank, count, tuple(used))


def _number(variables: Variables, name: str) -> int:
    text = variables[name].strip()
    if not text.isdecimal():
        raise ClusterError(
            f"the environment variable {name} is {text!r} and should be a number from 0 on; unset "
            "it, or let a launcher set it"
        )
    return int(text)


def _about_others(said: Sequence[Said], variables: Variables) -> str | None:
    """Return why Slurm, the last of them, does not speak of this process; None where it does."""
    if not said or said[-1].launcher != SLURM.name:
        return None
    nearer = [each.launcher for each in said if each.launcher in (TORCHRUN.name, OPEN_MPI.name)]
    nearer += [each.launcher for each in said if each.launcher == MPICH.name]
    if nearer:
        return f"they are about who has started {nearer[0]}, which is nearer to this process"
    if "SLURM_STEP_ID" not in variables:
        return "this is no step of srun, but the batch script or a shell beside it"
    return None


def _check_agree(first: Said, other: Said, variables: Variables) -> None:
    if (first.rank, first.size) == (other.rank, other.size):
        return
    values = ", ".join(f"{name}={variables[name]}" for name in (*first.variables, *other.variables))
    raise ClusterError(
        f"the environment contradicts itself: {first}, and {other} ({values}). Start with one "
        f"launcher only, or unset {' and '.join(first.variables)} or "
        f"{' and '.join(other.variables)}, whichever is not of this job"
    )
