"""Room: how much memory the host has left, and how much an allocation that failed had asked for."""

from __future__ import annotations

from math import inf, prod
from pathlib import Path
from typing import Any

_GROUP = Path("/sys/fs/cgroup")


def of_host() -> int:
    """Return how many bytes this process may still take, by the system's own word."""
    return int(max(0, min(_available(), _of_group(), _of_addresses())))


def asked(error: MemoryError) -> int | None:
    """Return the bytes that NumPy, or CuPy, did not get; None if the error is of somebody else."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if shape is not None and dtype is not None:
        return int(prod(shape)) * int(dtype.itemsize)
    size: Any = getattr(error, "_size", None)
    return None if size is None else int(size)


def _available() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts = dict(line.split(":") for line in lines)
        return int(amounts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return inf


def _of_group() -> float:
    """What a container leaves its processes."""
    try:
        limit = int((_GROUP / "memory.max").read_text())
        return limit - int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return inf


def _of_addresses() -> float:
    """What `ulimit -v` leaves this process."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return inf if limit == resource.RLIM_INFINITY else limit - used
    except (ImportError, OSError):
        return inf
