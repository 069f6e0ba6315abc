"""mpiexec: find it, and speak its dialect."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidist.errors import ClusterError, UsageError

NAMES = ("mpiexec", "mpirun")
ASKING = 20  # seconds that it has to say its version

# What a rank on another machine needs of the environment; MPICH hands on everything by itself.
EXPORTED = ("MINIDIST_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "NCCL_", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks at most it is for; None: as mpiexec likes."""

    name: str
    slots: int | None


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec: its path, its dialect ("mpich" or "openmpi"), and what it says of itself."""

    path: str
    dialect: str
    version: str

    def command(
        self, count: int, hosts: Sequence[Host], environment: Mapping[str, str], cores: int
    ) -> list[str]:
        """Return the command that starts `count` processes of what follows it.

        Each gets the variables of `environment`; cores: those of this machine.
        """
        if self.dialect == "mpich":
            named = ",".join(h.name if h.slots is None else f"{h.name}:{h.slots}" for h in hosts)
            return [self.path, *(["-hosts", named] if hosts else []), "-n", str(count)]
        named = ",".join(f"{h.name}:{h.slots or 1}" for h in hosts)
        # Ranks share the cores of a machine among their threads themselves.
        how = ["--bind-to", "none", *(["--host", named] if hosts else [])]
        if not hosts and count > cores:
            how.append("--oversubscribe")
        for name in environment:
            if name.startswith(EXPORTED):
                how += ["-x", name]
        return [self.path, *how, "-n", str(count)]


def candidates() -> list[str]:
    """Return where an mpiexec may be: beside this Python first, then on the PATH."""
    beside = [Path(sys.executable).with_name(name) for name in NAMES]
    found = [str(path) for path in beside if os.access(path, os.X_OK)]
    found += [path for path in map(shutil.which, NAMES) if path is not None]
    return list(dict.fromkeys(found))


def find(path: str | None = None) -> Mpiexec:
    """Return the mpiexec at a path, or the first of the candidates.

    Raises ClusterError where there is none, or it is not of a known kind.
    """
    if path is not None:
        there = shutil.which(path)
        if there is None:
            raise ClusterError(f"there is no program {path!r} to be used as mpiexec")
        return _ask(there)
    for candidate in candidates():
        return _ask(candidate)
    raise ClusterError(
        f"there is no mpiexec beside {sys.executable} or on the PATH: pip install 'minidist[mpi]' "
        "brings one; or load your cluster's MPI, or say where it is with --mpiexec"
    )


def _ask(path: str) -> Mpiexec:
    try:
        asked = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ASKING,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise ClusterError(f"{path} --version does not answer: {cause}") from cause
    said = asked.stdout
    if "HYDRA" in said or "Intel(R) MPI" in said:
        version = next((line for line in said.splitlines() if "Version:" in line), said)
        return Mpiexec(path, "mpich", f"Hydra {version.split(':')[-1].strip()}")
    if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said:
        return Mpiexec(path, "openmpi", said.splitlines()[0].strip())
    raise ClusterError(
        f"{path} is neither MPICH's, Intel MPI's nor Open MPI's: --version says "
        f"{said.strip()[:200]!r}; start the processes with it directly, without minidist.launch"
    )


def parse_hosts(text: str) -> list[Host]:
    """Return the machines of "a:2,b:2" or "a,b".

    Raises UsageError for what is no such list.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not name or (colon and not (slots.isdecimal() and int(slots) > 0)):
            raise UsageError(f"{part.strip()!r} is no machine with or without a count, as a:2")
        hosts.append(Host(name, int(slots) if colon else None))
    return hosts


def read_hostfile(path: str) -> list[Host]:
    """Return the machines of a file: one on each line, as "a", "a:2" or "a slots=2"; # comments.

    Raises UsageError for a file or line that cannot be read.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as cause:
        raise UsageError(f"--hostfile={path}: {cause.strerror}") from cause
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        try:
            hosts += parse_hosts(f"{words[0]}:{slots[0]}" if slots else words[0])
        except UsageError as error:
            raise UsageError(f"--hostfile={path}, line {number}: {error}") from None
    if not hosts:
        raise UsageError(f"--hostfile={path} names no machine")
    return hosts
