"""Lane: the ranks of one place on every machine (machines.py), and the messages between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minidist import observe
from minidist.comm.mpi import Pending
from minidist.comm.peers import Ranks
from minidist.comm.scratch import Scratch
from minidist.device import Array

PARTS, TOTALS = 0, 1  # kinds of messages, which may overtake each other
Under = tuple[int, Pending]  # a message under way, from or to a peer


class Lane:
    """machines: which peer speaks for each machine. me: the number of this rank's machine."""

    def __init__(self, peers: Ranks, machines: Sequence[int]) -> None:
        self.peers = peers
        self.machines = tuple(machines)
        self.me = self.machines.index(peers.me)
        self._leaving: deque[tuple[Sequence[Under], Scratch]] = deque()

    @property
    def count(self) -> int:
        return len(self.machines)

    def name(self, machine: int) -> str:
        """Return what the rank that speaks for a machine is called."""
        return self.peers.names[self.machines[machine]]

    def send(self, to: int, array: Array, kind: int) -> Under:
        """Send an array to a machine."""
        if observe.counting:
            observe.moved(self.name(self.me), self.name(to), array.nbytes, "network")
        return self.machines[to], self.peers.send(self.machines[to], array, kind)

    def receive(self, source: int, array: Array, kind: int) -> Under:
        """Receive an array from a machine."""
        return self.machines[source], self.peers.receive(self.machines[source], array, kind)

    def wait(self, messages: Sequence[Under]) -> None:
        """Wait for messages; raises what Peers.wait does."""
        self.peers.wait(messages, "sum")

    def let_go(self, messages: Sequence[Under], scratch: Scratch) -> None:
        """Give buffers back once what was sent from them has left."""
        self._leaving.append((messages, scratch))
        while len(self._leaving) > 2 * self.count:
            self._release()

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        while self._leaving:
            self._release()

    def _release(self) -> None:
        messages, scratch = self._leaving.popleft()
        self.wait(messages)
        scratch.close()
