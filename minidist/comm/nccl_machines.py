"""NcclMachines: NCCL within each machine, and something else between them, as in `nccl/xring`.

    machine 0   r0 r1 ──NCCL──► sum on r0 ──┐             ┌──► total ──► r0 r1
                                            ├── between ──┤
    machine 1   r2 r3 ──NCCL──► sum on r2 ──┘             └──► total ──► r2 r3

For machines whose GPUs NCCL does not reach from another one. From there on it is as in tiered.py,
where on each machine one replica has a say: the first, which brings what NCCL has summed to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.nccl import Nccl
from minidist.comm.peers import Ranks
from minidist.comm.row import Row, columns
from minidist.comm.scratch import Scratch
from minidist.comm.tiered import Tiered
from minidist.device import Device
from minidist.traffic import Outline, Places, Traffic


class NcclMachines(Tiered):
    """A communicator across ranks, of which those of a machine sum by NCCL; see Tiered."""

    def __init__(
        self,
        devices: Sequence[Device],
        peers: Ranks,
        counts: Sequence[int],
        between: str,
        shards: int = 1,
    ) -> None:
        super().__init__(devices, peers, counts, "serial", between, shards)
        here = self._machines.here
        self._nccl = Nccl(devices, peers=peers, counts=counts, members=here)
        self._speaks = peers.me == here[0]
        self._voices = [0.0] * self.replicas  # the weights of the replicas between machines
        for ranks in self._machines.ranks:
            self._voices[sum(counts[: ranks[0]])] = 1.0
        self.order = f"nccl/{between}"

    def close(self) -> None:
        self._nccl.close()

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        like = sources[0]
        whole = [t for t, array in enumerate(like) if array.dtype.kind in "iu"]
        if whole:  # they have one sum, and no weights
            given, wanted = columns(sources, whole), columns(destinations, whole)
            super()._all_reduce(given, wanted, weights, scale, threads)
        rest = [t for t in range(len(like)) if t not in whole]
        if rest:
            given, wanted = columns(sources, rest), columns(destinations, rest)
            self._floats(given, wanted, weights, scale, threads)

    def _floats(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        with Scratch() as scratch:
            sums = [scratch.like(self.devices[0], sources[0])] if self._speaks else []
            self._nccl.reduce_to_rank(0, sources, sums, weights, 1.0, threads)
            brought = [*sums, *sources[len(sums) :]]
            super()._all_reduce(brought, destinations, self._voices, scale, threads)

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        whole = [t for t, tensor in enumerate(tensors) if tensor.dtype.kind in "iu"]
        rest = [t for t in range(len(tensors)) if t not in whole]
        traffic = super().predicted_bytes(
            [tensors[t] for t in whole], [[places[t] for t in whole] for places in destinations]
        )
        row = [tensors[t] for t in rest]
        home = [[self.devices[0]] * len(row)] if self._speaks else []
        traffic.update(self._nccl.predicted_bytes(row, home))
        counts = [int(peer == self._machines.here[0]) for peer in self._machines.here]
        brings = self.devices[:1] if self._speaks else ()
        wanted = [[places[t] for t in rest] for places in destinations]
        traffic.update(self._moved(row, wanted, brings, counts))
        return traffic
