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

    peers: the workers that are in step with this one, itself among them. counts: how many replicas
    each of them has. Replicas are numbered through, worker by worker.
    """

    devices: tuple[Device, ...]
    cluster: Cluster
    peers: Peers
    counts: tuple[int, ...]

    @classmethod
    def of(
        cls, devices: Sequence[Device], cluster: Cluster, *, in_step: bool, patience: Patience
    ) -> Site:
        """Return that of a strategy; in_step: whether its workers meet. All of them must ask."""
        peers = cluster.peers(patience) if in_step else Peers()
        brought = peers.meet("make a strategy", struct.pack("<I", len(devices)))
        counts = [struct.unpack("<I", each)[0] for each in brought]
        return cls(tuple(devices), cluster, peers, tuple(counts))

    @classmethod
    def alone(cls, devices: Sequence[Device]) -> Site:
        """Return that of devices of one process which is in step with no other."""
        return cls(tuple(devices), alone(), Peers(), (len(devices),))

    @property
    def replicas(self) -> int:
        """How many replicas there are in step."""
        return sum(self.counts)

    @property
    def first(self) -> int:
        """The number of this process's first replica."""
        return sum(self.counts[: self.peers.me])
