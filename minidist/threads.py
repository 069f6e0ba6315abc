"""How many threads compute: the machine's cores, shared among the replicas that run at a time.

NumPy's BLAS keeps a pool of its own for the whole process. While strategies are open it is limited
to cores ÷ replicas, for the strategy with the most replicas, so that replicas computing side by
side never ask for more threads than there are cores. The last strategy to close gives it back.
"""

from __future__ import annotations

import os
import threading
from typing import Any

_lock = threading.Lock()
_replicas: dict[int, int] = {}  # open strategies, by id, and their replicas
_limits: Any = None  # what restores the limit that was found

# A child that is forked while another thread is at work here must not find the lock taken for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    global _limits
    from threadpoolctl import threadpool_limits  # 4 ms that a mere import need not pay

    if _limits is not None:
        _limits.restore_original_limits()
        _limits = None
    if _replicas:
        _limits = threadpool_limits(max(1, cores() // max(_replicas.values())), user_api="blas")
