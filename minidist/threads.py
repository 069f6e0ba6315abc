"""How many threads compute: the machine's cores, shared among the replicas that run at a time.

Where several processes of a job share a machine, each has its part of the cores.

NumPy's BLAS keeps a pool of its own for the whole process. While strategies are open it is limited
to cores ÷ replicas, for the strategy with the most replicas, so that replicas computing side by
side never ask for more threads than there are cores. The last strategy to close gives it back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from minidist.errors import ThreadError

_lock = threading.Lock()
_replicas: dict[int, int] = {}  # open strategies, by id, and their replicas
_limits: Any = None  # what restores the limit that was found
_part: int | None = None  # of the cores, where other processes of the job use them too
_per_replica: int | None = None  # threads of a replica, until one of the above changes

# A child that is forked while another thread is at work here must not find the lock taken for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def allowed() -> set[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@cache
def quota() -> float:
    """Return how many cores' time a container allows its processes together; often infinite."""
    try:
        time, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(time) / int(period)
    except (OSError, ValueError):
        return float("inf")


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises ThreadError where the system has no memory or no number for it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadError(
            f"the thread {thread.name!r} could not be started, which mostly means that memory is "
            f"short ({error}): take fewer devices, or let the process have more memory (ulimit -v) "
            "and threads (ulimit -u)"
        ) from error


def cores() -> int:
    """Return how many cores this process is to use."""
    return max(1, int(min(len(allowed()), quota()))) if _part is None else _part


def part(mine: Collection[int], all_on_machine: Collection[Collection[int]]) -> int:
    """Return how many of its cores a process gets: of each, what those that may use it leave it.

    mine: the cores that it may run on; all_on_machine: the same of all that share its machine,
    itself too. Processes that are bound to cores of their own so keep them.
    """
    users = {core: sum(core in theirs for theirs in all_on_machine) for core in mine}
    of_time = quota() / len(all_on_machine)
    return max(1, int(min(sum(Fraction(1, n) for n in users.values()), of_time)))


def divide(mine: Collection[int], all_on_machine: Iterable[Collection[int]]) -> None:
    """From now on use only this process's part of the cores; see `part`."""
    global _part, _per_replica
    _part, _per_replica = part(mine, list(all_on_machine)), None


def per_replica() -> int:
    """Return how many threads compute for each replica, and for who computes without replicas."""
    global _per_replica
    threads = _per_replica  # which another thread may reset at any time
    if threads is None:
        _per_replica = threads = max(1, cores() // max(list(_replicas.values()), default=1))
    return threads


def limit_blas(owner: object, replicas: int) -> None:
    """Share the cores among `replicas` until `owner` calls `release_blas`."""
    with _lock:
        _replicas[id(owner)] = replicas
        _set()


def release_blas(owner: object) -> None:
    """End the limit of `owner`. To end one that there is not does nothing."""
    with _lock:
        if _replicas.pop(id(owner), None) is not None:
            _set()


def _set() -> None:
    global _limits, _per_replica
    from threadpoolctl import threadpool_limits  # 4 ms that a mere import need not pay

    _per_replica = None
    if _limits is not None:
        _limits.restore_original_limits()
        _limits = None
    if _replicas:
        _limits = threadpool_limits(per_replica(), user_api="blas")
