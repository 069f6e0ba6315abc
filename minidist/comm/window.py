"""Window: memory that the ranks of one machine share. Each has a part, and takes plots of it.

MPI gives each rank a part of the window, which all others on its machine can read and write. Of
its own part a rank takes plots, as malloc would, and tells the others where they lie.

    rank 0's part   │ mail │ board             │ mail │
    rank 1's part   │ mail │ mail │ board             │
                       └── a group of ranks, and what each of them writes for the others

mail.py has the plots in which ranks meet, boards.py those through which arrays go, and fields.py
those in which arrays lie.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence

from minidist.device import Array

LINE = 64  # bytes; plots begin at multiples of it, most of them with a fence of as many


class Part:
    """This rank's part of the window, of which plots are taken and given back."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self._free = [(0, len(memory))]  # (first byte, bytes), in order and none next to another
        self._retired: list[tuple[int, int, Callable[[], bool]]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int | None:
        """Return where a plot of so many bytes begins; None where there is no room.

        Its first line is cleared: a fence there is as nobody has advanced it.
        """
        nbytes = -(-nbytes // LINE) * LINE
        with self._lock:
            self._clear_away()
            for i, (start, room) in enumerate(self._free):
                if room >= nbytes:
                    self._free[i : i + 1] = [(start + nbytes, room - nbytes)] * (room > nbytes)
                    self._memory[start : start + LINE] = 0
                    return start
        return None

    def retire(self, start: int, nbytes: int, unread: Callable[[], bool]) -> None:
        """End the use of a plot. It is taken again once no other rank may read it any more."""
        with self._lock:
            self._retired.append((start, -(-nbytes // LINE) * LINE, unread))

    def _clear_away(self) -> None:
        retired, self._retired = self._retired, []
        for start, nbytes, unread in retired:
            if unread():
                insort(self._free, (start, nbytes))
            else:
                self._retired.append((start, nbytes, unread))
        joined: list[tuple[int, int]] = []
        for start, room in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((start, room))
        self._free = joined


class Plots:
    """The plots of a group of ranks, seen from one of them.

    part: this rank's part of the window, if it has one. memory: the part of each member on this
    machine, None for the others.
    """

    def __init__(self, part: Part | None, memory: Sequence[Array | None]) -> None:
        self._part = part
        self._memory = memory
        self.taken: list[tuple[int, int]] = []  # first byte and bytes, of this rank's

    def reaches(self, member: int) -> bool:
        """Whether a member's part can be read here."""
        return self._memory[member] is not None

    def take(self, nbytes: int) -> int:
        """Return where a new plot of this rank begins, or -1 if there is no room."""
        start = None if self._part is None else self._part.take(nbytes)
        if start is None:
            return -1
        self.taken.append((start, nbytes))
        return start

    def at(self, member: int, start: int, nbytes: int) -> Array:
        """Return the memory of a member's plot, as bytes."""
        memory = self._memory[member]
        assert memory is not None
        return memory[start : start + nbytes]

    def retire(self, unread: Callable[[], bool]) -> None:
        """Give this rank's back, each once it is unread."""
        taken, self.taken = self.taken, []
        for start, nbytes in taken:
            assert self._part is not None
            self._part.retire(start, nbytes, unread)
