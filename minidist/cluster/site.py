"""Site: where the replicas of one strategy are, in this process and in those it is in step with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.cluster.cluster import Cluster, alone
from minidist.comm.peers import Patience, Peers
from minidist.device import Device


@dataclass(frozen=True)
class Site:
    """The devices of this process, and the peers with theirs.

    peers: the workers that are in step with this one, itself among them. sums: the same, over a
    channel of its own, for what is summed while replicas meet for other things. files: all workers
    of the cluster, in step or not, which save and load together. counts: how many replicas each of
    the peers has, and everywhere: each of all workers. Replicas are numbered through, worker by
    worker. patience: for how long this process waits for others.
    """

    devices: tuple[Device, ...]
    cluster: Cluster
    peers: Peers
    sums: Peers
    files: Peers
    counts: tuple[int, ...]
    everywhere: tuple[int, ...]
    patience: Patience = Peers.patience

    @classmethod
    def of(
        cls, devices: Sequence[Device], cluster: Cluster, *, in_step: bool, patience: Patience
    ) -> Site:
        """Return that of a strategy; in_step: whether its workers meet. All of them must ask."""
        peers, sums = [cluster.peers(patience) if in_step else Peers(patience) for _ in range(2)]
        files = cluster.peers(patience)
        brought = files.meet("make a strategy", struct.pack("<I", len(devices)))
        everywhere = tuple([struct.unpack("<I", each)[0] for each in brought])
        counts = everywhere if in_step else (len(devices),)
        return cls(tuple(devices), cluster, peers, sums, files, counts, everywhere, patience)

    @classmethod
    def alone(cls, devices: Sequence[Device]) -> Site:
        """Return that of devices of one process which is in step with no other."""
        counts = (len(devices),)
        return cls(tuple(devices), alone(), Peers(), Peers(), Peers(), counts, counts)

    def fail(self, failure: BaseException) -> None:
        """Tell the peers that this process has failed, so that they do not wait for it."""
        for peers in (self.peers, self.sums, self.files):
            peers.fail(failure)

    def leave(self) -> None:
        """Tell the peers that this process takes no further part."""
        for peers in (self.peers, self.sums, self.files):
            peers.leave()

    @property
    def replicas(self) -> int:
        """How many replicas there are in step."""
        return sum(self.counts)

    @property
    def first(self) -> int:
        """The number of this process's first replica among those in step."""
        return sum(self.counts[: self.peers.me])

    @property
    def first_everywhere(self) -> int:
        """Its number among those of all workers, in step or not: it keys data and randomness."""
        return sum(self.everywhere[: self.files.me])
