"""The machine: cores and memory, and what of them this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
from pathlib import Path
from typing import Any

from minidist import threads
from minidist.doctor.findings import Findings
from minidist.launch.supervisor import LAUNCH  # has a secret in it

SHARED = Path("/dev/shm")
ENOUGH = 256 << 20  # bytes of shared memory with which ranks of one machine have no trouble
LEFT_BEHIND = ("mpich_shm_", "sm_segment.", "vader_segment.")  # by MPI's ranks that were killed
# What changes how many threads compute, or how minidist behaves.
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH")


def find() -> Findings:
    """Return cores, memory, and the environment variables that matter."""
    found = Findings()
    allowed, quota = threads.allowed(), threads.quota()
    found.facts["machine"] = {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "allowed_cores": len(allowed),
        "quota": None if quota == float("inf") else quota,
        "threads": threads.cores(),
        "memory": _memory(),
        "shared_memory": _shared_memory(found),
    }
    found.facts["environment"] = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or (name.startswith("MINIDIST_") and name != LAUNCH)
    }
    return found


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    """Return the bytes of memory, None where the system does not tell."""
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _shared_memory(found: Findings) -> dict[str, Any] | None:
    if not SHARED.is_dir():
        return None
    usage = shutil.disk_usage(SHARED)
    left = _left_behind()
    size = sum(bytes_ for _, bytes_ in left)
    if usage.free < ENOUGH:
        cure = "start a container with more of it, as docker run --shm-size=2g"
        if size:
            cure = f"rm {' '.join(path for path, _ in left)}, or {cure}"
        found.wrong(
            f"{SHARED} has only {usage.free >> 20} MB free, and ranks on one machine exchange "
            "their data there",
            cure,
        )
    return {
        "total": usage.total,
        "free": usage.free,
        "left_behind": [path for path, _ in left],
        "left_behind_bytes": size,
    }


def _left_behind() -> list[tuple[str, int]]:
    """Return files of MPI's, with their sizes: this user's, that no process has open."""
    mine: dict[str, int] = {}
    for path in SHARED.iterdir():
        with contextlib.suppress(OSError):
            about = path.stat()
            if path.name.startswith(LEFT_BEHIND) and about.st_uid == os.getuid():
                mine[str(path)] = about.st_size
    if not mine:
        return []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            mine = {path: size for path, size in mine.items() if path not in maps}
    return sorted((path, size) for path, size in mine.items() if os.path.exists(path))
