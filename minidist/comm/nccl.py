"""nccl: NCCL sums on the GPUs, over whatever links there are between them, on machines alike.

      replica 0   g0 ─► rank 0 ──┐                     ┌──►  destination 0
      replica 1   g1 ─► rank 1 ──┼──►  ncclAllReduce ──┼──►  destination 1
      replica 2   g2 ─► rank 2 ──┘                     └──►  destination 2

Each replica is a rank. Where several share a GPU, and NCCL is older than 2.30 or the driver than
CUDA 12.3, they are one team (nccl_teams.py), which sums on its GPU first; and under `copy/nccl` all
replicas of a process are. In what order NCCL sums is its own business: it may depend on size, links
and version, so the bits are those of no class. All replicas get the same ones. float16 and bfloat16
travel, and are added up, as they are.

Everything goes to the devices' communication streams, which follow whoever makes what is read; the
calling thread goes on. Of several processes every verb begins with a meeting, as in tiered.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from minidist import observe
from minidist.comm import nccl_passing as passing
from minidist.comm.base import Communicator
from minidist.comm.cutting import Plan
from minidist.comm.nccl_library import AVERAGE, SUM, TYPES, load
from minidist.comm.nccl_ranks import NcclRanks
from minidist.comm.nccl_teams import Team, Teams, by_gpu, one_each, placed_on
from minidist.comm.orders import check
from minidist.comm.packing import Packer
from minidist.comm.peers import Peers
from minidist.comm.row import Row, columns, kinds
from minidist.comm.scratch import Scratch
from minidist.device import Device
from minidist.errors import ShapeError, UsageError
from minidist.traffic import Outline, Places, Traffic

# Is given the destinations, what the ranks here send, and where to take memory from.
Get = Callable[[Sequence[Row], Sequence[Row], Scratch], None]


class Nccl(Communicator):
    """Sums by NCCL.

    peers, counts: the processes, and how many replicas each of them has. members: those whose
    replicas are summed with these, all by default. inside: how the replicas of this process are
    summed before NCCL gets them; by default it gets them one by one.
    Raises UsageError where a device is no GPU or NCCL cannot be had, and what NcclRanks raises.
    """

    order = "nccl"

    def __init__(
        self,
        devices: Sequence[Device],
        packer: Packer | None = None,
        *,
        peers: Peers | None = None,
        counts: Sequence[int] = (),
        members: Sequence[int] | None = None,
        inside: Communicator | None = None,
    ) -> None:
        self.devices = tuple(devices)
        for device in devices:
            if device.kind != "cuda":
                raise UsageError(f"nccl sums on GPUs, and {device.short} is none; use auto")
        self._packer = packer
        self._peers = peers or Peers()
        self._counts = tuple(counts or [len(self.devices)])
        self._members = tuple(range(self._peers.count)) if members is None else tuple(members)
        self._library = load()
        if inside is not None:
            teams = [Team(range(len(devices)), inside)]
        else:
            teams = one_each(devices) if self._library.several else by_gpu(devices)
        self._teams = Teams(devices, teams)
        self._ranks = NcclRanks(self._library, self._teams, self._peers, self._members)

    @property
    def replicas(self) -> int:
        return sum(self._counts)

    @property
    def first(self) -> int:
        return sum(self._counts[: self._peers.me])

    def close(self) -> None:
        self._ranks.close()

    # --- sums

    def _heard(
        self, sources: Sequence[Row], weights: Sequence[float] | None
    ) -> tuple[Sequence[Row], Sequence[float] | None]:
        """All replicas of this process bring a row, and the weights are those of all processes'."""
        own = len(self.devices)
        if len(sources) != own:
            raise UsageError(f"all_reduce: {len(sources)} rows for the {own} replicas here")
        if weights is not None and len(weights) != self.replicas:
            raise UsageError(f"all_reduce: {len(weights)} weights for {self.replicas} replicas")
        return sources, weights

    def _all_reduce(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        own = self._begin("all_reduce", sources, weights, scale)
        teams, call = self._teams, self._library.all_reduce

        def all_get(wanted: Sequence[Row], sent: Sequence[Row], scratch: Scratch) -> None:
            totals = teams.totals(wanted, sent, scratch)
            self._call("all_reduce", call, sent, totals, scale, threads)
            teams.hand_out(totals, wanted)

        self._on_streams(lambda: self._by_dtype(sources, destinations, own, threads, all_get))

    def _reduce_to(
        self,
        root: int,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        rank = self._ranks.of[root]
        self.reduce_to_rank(rank, sources, destinations, weights, scale, threads)

    def reduce_to_rank(
        self,
        rank: int,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """Put the sum into the destinations, of which only the process of a rank may have any."""
        own = self._begin("reduce", sources, weights, scale)
        teams, call = self._teams, partial(self._library.reduce, root=rank)
        here = rank - self._ranks.first

        def one_gets(wanted: Sequence[Row], sent: Sequence[Row], scratch: Scratch) -> None:
            totals = [Row([], []) for _ in sent]
            if wanted:
                totals[here] = placed_on(teams.speakers[here], sent[here], wanted, scratch)
            self._call("reduce", call, sent, totals, scale, threads)
            teams.hand_out([totals[here]] * len(totals) if wanted else [], wanted)

        self._on_streams(lambda: self._by_dtype(sources, destinations, own, threads, one_gets))

    def _by_dtype(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        own: Sequence[float] | None,
        threads: int,
        get: Get,
    ) -> None:
        """Let the destinations get the sum, of one dtype after the other."""
        for members in _dtypes(sources[0]):
            parts = columns(sources, members), columns(destinations, members)
            with self._packed(*parts) as (given, wanted), Scratch() as scratch:
                get(wanted, self._teams.brought(given, own, scratch, threads), scratch)

    def _sum_shares(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        plan: Plan,
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        """NCCL shares out what divides by the number of its ranks, each of them a replica's."""
        ranks, teams = self._ranks, self._teams
        whole = ranks.count == self.replicas and self._packer is None
        if not whole or any(array.size % self.replicas for array in sources[0]):
            super()._sum_shares(sources, destinations, plan, weights, scale, threads)
            return
        sources, weights = self._heard(sources, weights)
        own = self._begin("reduce_scatter", sources, weights, scale)
        call = self._library.reduce_scatter

        def work() -> None:
            for members in _dtypes(sources[0]):
                given, wanted = columns(sources, members), columns(destinations, members)
                with Scratch() as scratch:
                    sent = teams.brought(given, own, scratch, threads)
                    into = [
                        placed_on(speaker, row, [row], scratch)
                        for speaker, row in zip(teams.speakers, wanted, strict=True)
                    ]
                    self._call("reduce_scatter", call, sent, into, scale, threads, ranks.count)
                    for rank, row in enumerate(wanted):
                        teams.hand_out([into[rank]] * len(into), [row])

        self._on_streams(work)

    def _begin(
        self,
        verb: str,
        sources: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
    ) -> Sequence[float] | None:
        """Check what is to be summed, meet the others, and return the weights of the sources."""
        for array in sources[0]:
            check(array.dtype, weights, scale)
            if array.dtype.name not in TYPES:
                raise ShapeError(
                    f"{verb}: NCCL cannot add up {array.dtype}; convert it with ops.cast"
                )
        if self._peers.count > 1:
            self._agree(f"{verb} {kinds(sources[0])} times {weights} and {scale} by NCCL")
        return None if weights is None else weights[self.first :][: len(sources)]

    def _call(
        self,
        what: str,
        call: Callable[..., None],
        sent: Sequence[Row],
        into: Sequence[Row],
        scale: float,
        threads: int,
        parts: int = 1,
    ) -> None:
        """Let a call of NCCL put the sum of what the ranks send, times the scale, into rows.

        what: its name. parts: into how many the sum is shared out.
        """
        dtype, n = sent[0][0].dtype, self._ranks.count
        kind, how = TYPES[dtype.name], SUM
        if scale == 1 / n and n & (n - 1) == 0:  # which is exact before the sum too
            how, scale = AVERAGE, 1.0

        def give(rank: int, handle: Any, stream: int) -> None:
            for t, array in enumerate(sent[rank]):
                to = into[rank][t].data.ptr if into[rank] else 0
                count = array.size // parts
                call(handle, array.data.ptr, to, count, kind, how, stream=stream)

        if observe.counting:
            passing.tell(self._teams.speakers, sent, "sums")
        self._ranks.give(f"{what} of {kinds(sent[0])}", sent, into, give)
        if scale != 1:
            for device, row in zip(self._teams.speakers, into, strict=True):
                if row:
                    device.ops.sum([row], [row], scale=scale, threads=threads)

    def _packed(
        self, sources: Sequence[Row], destinations: Sequence[Row]
    ) -> AbstractContextManager[tuple[Sequence[Row], Sequence[Row]]]:
        if self._packer is None:
            return nullcontext((sources, destinations))
        return self._packer.packed(sources, destinations)

    def _on_streams(self, work: Callable[[], object]) -> None:
        """Let all that `work` gives to devices go to their communication streams."""
        self.devices[0].stream("communication").submit(work)

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        traffic = Traffic()
        for members in _dtypes(tensors):
            row: Sequence[Outline] = [tensors[t] for t in members]
            wanted: Sequence[Places] = [[places[t] for t in members] for places in destinations]
            if self._packer is not None:
                row, wanted = self._packer.predicted_bytes(traffic, row, wanted)
            traffic.update(self._teams.predicted_bytes(row, wanted))
        return traffic

    # --- rows as they are

    def _broadcast_rows(self, rows: Sequence[Row], root: int) -> None:
        if self._peers.count > 1:
            self._agree(f"broadcast {kinds(rows[0])} from replica {root} by NCCL")
        here = range(self.first, self.first + len(self.devices))
        source = rows[root - self.first] if root in here else None
        to = self._ranks.of[root]
        self._on_streams(lambda: passing.broadcast(self._ranks, self._teams, rows, to, source))

    def _gather_rows(self, sources: Sequence[Row]) -> list[Row]:
        if self._peers.count == 1:
            return list(sources)
        met = self._peers.meet("all_gather by NCCL", passing.outlines(sources))
        mine, device = self._peers.me, self.devices[0]
        every = [
            list(sources) if peer == mine else passing.made(device, theirs)
            for peer, theirs in enumerate(met)
        ]
        self._on_streams(lambda: passing.all_gather(self._ranks, self._teams, every, mine))
        return [row for rows in every for row in rows]


def _dtypes(tensors: Sequence[Any]) -> Iterator[list[int]]:
    """Give for each dtype the numbers of the tensors of it that have any elements."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [t for t, one in enumerate(tensors) if one.dtype == dtype and one.size]
        if members:
            yield members
