"""hierarchical_copy: two groups, each of which sums on its own before the two sums meet.

      replica 0   g0 ──┐ within                                  ┌──►  destination 0
      replica 1   g1 ──┴─► g0 + g1 ──┐ across             back   ├──►  destination 1
                                     ├─► (g0 + g1) + (g2 + g3) ──┤
      replica 2   g2 ──┬─► g2 + g3 ──┘                           ├──►  destination 2
      replica 3   g3 ──┘                                         └──►  destination 3

For machines in which the links within a group are fast and those between groups few: only two sums
go across, one each way. Where n is odd the first group is the larger. Tensor i is summed on device
i modulo the group's size in each group. Within a group the order is the tree's (tree.py), so that
all of it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist import observe
from minidist.comm.algorithm import Algorithm
from minidist.comm.packing import Packer
from minidist.comm.row import Row, tell
from minidist.comm.scratch import Scratch
from minidist.comm.tree import halves
from minidist.device import Device
from minidist.errors import UsageError
from minidist.traffic import Outline, Places, Traffic


class HierarchicalCopy(Algorithm):
    """All-reduce within two groups, across and back."""

    order = "tree"

    def __init__(self, devices: Sequence[Device], packer: Packer | None = None) -> None:
        super().__init__(devices, packer)
        if len(devices) < 2:
            raise UsageError(
                "hierarchical_copy makes two groups of the devices, and there is one device; "
                "use auto, or more devices"
            )

    def _sum(
        self,
        sources: Sequence[Row],
        destinations: Sequence[Row],
        weights: Sequence[float] | None,
        scale: float,
        threads: int,
    ) -> None:
        groups = halves(range(len(sources)))
        with (
            self._weighted(sources, weights, threads) as weighted,
            self._packed(weighted, destinations) as (given, wanted),
            Scratch() as scratch,
        ):
            mains = [[given[i].devices[0] for i in group] for group in groups]
            sums = [
                self._within([given[i] for i in group], devices, scratch, threads)
                for group, devices in zip(groups, mains, strict=True)
            ]
            totals = [scratch.spread(devices, given[0]) for devices in mains]
            if observe.counting:  # each group's devices read both sums
                for total in totals:
                    tell(total.devices, [total], sums)
            self._ops.sum(totals, sums, scale=scale, threads=threads)
            for total, members in zip(totals, halves(wanted), strict=True):
                if members:
                    self._copy(members, total, threads)

    def _within(
        self, rows: Sequence[Row], mains: Sequence[Device], scratch: Scratch, threads: int
    ) -> Row:
        """Return a group's sum: the row itself of one that is alone, else scratch."""
        if len(rows) == 1:
            return rows[0]
        first, second = halves(rows)
        sums = [self._within(half, mains, scratch, threads) for half in (first, second)]
        into = scratch.spread(mains, rows[0]) if len(first) == 1 else sums[0]
        self._sum_by(into.devices, [into], sums, threads=threads)
        return into

    def _sum_bytes(self, tensors: Sequence[Outline], destinations: Sequence[Places]) -> Traffic:
        """Of tensor i, device i modulo the group's size gets the others' of its group.

        It gets the other group's sum from that one's device, and gives the whole one to all of the
        destinations that belong to its group.
        """
        traffic = Traffic()
        tensors, destinations = self._packed_bytes(traffic, tensors, destinations)
        groups = halves(self.devices)
        for i, tensor in enumerate(tensors):
            mains = [group[i % len(group)] for group in groups]
            for main, group, wanted in zip(mains, groups, halves(destinations), strict=True):
                for device in group:
                    traffic.go(device, main, tensor.nbytes)
                for places in wanted:
                    traffic.go(main, places[i], tensor.nbytes)
            traffic.go(mains[0], mains[1], tensor.nbytes)
            traffic.go(mains[1], mains[0], tensor.nbytes)
        return traffic
