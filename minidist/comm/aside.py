"""Aside: calls into a library that may block, and its progress, waited for with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from minidist.kernels.rendezvous import Fence
from minidist.patience import Waiting

NAP = 50e-6  # seconds between two questions


class Progress:
    """A fence that has reached 1 once `ready()`, which is asked again and again."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    @property
    def value(self) -> int:
        return int(self._ready())

    def wait(self, target: int, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._ready():
            if time.monotonic() > end:
                return False
            time.sleep(NAP)
        return True


def aside(
    name: str, works: Sequence[Callable[[], object]], waiting: Waiting, what: Callable[[], str]
) -> Iterator[None]:
    """Do what may block on threads of its own, and give the caller a look now and then.

    Raises the first of what they raise, and HangError once waiting is over: then they are left.
    """
    failures: list[BaseException] = []
    fence = Fence()

    def do(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)
        finally:
            fence.advance(1)

    for work in works:
        threading.Thread(target=do, args=(work,), name=name, daemon=True).start()
    while fence.value < len(works):
        yield
        waiting.tick(fence, len(works), what)
    if failures:
        raise failures[0]
