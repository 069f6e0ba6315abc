"""In the update: replicas add up all replicas' gradients in the pass that updates all copies.

    replica 0    g0 ─┬──► its part of w0 and w1 −= lr · (g0 + g1)/2
                     │
    replica 1    g1 ─┴──► its part of w0 and w1 −= lr · (g0 + g1)/2

No sum is stored, nobody waits for one, and there are no buckets. Of n replicas each reads a part of
n gradients, computes what becomes of that part of the variables, and writes it to n copies: what
reduce-scatter and all-gather would move is moved, and no element is computed twice. Every element
is added up in replica order and rounded as it would be in a bucket, so no bit differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minidist import observe
from minidist.comm import Row
from minidist.traffic import Traffic
from minidist.variable import Variable
from minidist.variable_mgr.agreement import Agreement
from minidist.variable_mgr.apply import shares
from minidist.variable_mgr.combine import AllReduce, whole
from minidist.variable_mgr.contribution import Combined, Contribution
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.optim import Optimizer


class SumInUpdate(AllReduce):
    """Leaves the sum to the updates, but where it is wanted before them, or gradients may change.

    All replicas are in this process, on devices of one memory whose updates can add up.
    """

    def combine(
        self, contributions: Sequence[Contribution], agreed: Agreement, threads: int
    ) -> Combined | None:
        final = all(contribution.reusable for contribution in contributions)
        if not final or contributions[0].optimizer.needs_sums:
            return super().combine(contributions, agreed, threads)
        addends = self.addends(contributions, agreed)
        if addends is None:
            return None
        combined, sources, weights, sparse, _ = addends
        group = combined.group
        having_a_say = [k for k in range(len(sources)) if weights is None or weights[k]]
        terms = [whole(group.variables, sources[k], sparse) for k in having_a_say]
        if observe.counting:
            _tell(group, terms, sparse)
        rows = [list(terms[0]) for _ in group.copies]
        self.put_sparse(rows, group, sources, weights, sparse)
        combined.rows, combined.others = rows, terms[1:]
        if weights is not None:
            combined.counts = [weights[k] for k in having_a_say]
        return combined

    def predicted_bytes(
        self, rows: Sequence[Sequence[Variable]], optimizer: Optimizer | None
    ) -> Traffic:
        """Each part of all gradients to the replica that updates it."""
        if optimizer is not None and optimizer.needs_sums:
            return super().predicted_bytes(rows, optimizer)
        traffic = Traffic()
        for row in rows:
            for part, device in zip(shares(row), self._communicator.devices, strict=True):
                for source in self._communicator.devices:
                    traffic.go(source, device, part)
        return traffic


def _tell(group: Group, terms: Sequence[Row], sparse: Sequence[int]) -> None:
    """Tell that every replica is going to read its part of all that is not sparse."""
    dense = [variable for i, variable in enumerate(group.variables) if i not in sparse]
    for part, copies in zip(shares(dense), group.copies, strict=True):
        for term in terms:
            source, device = term.devices[0], copies[0].device
            if source is not device:
                observe.moved(source.short, device.short, part, "sums")
