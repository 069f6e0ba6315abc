"""In the update: each replica adds up all replicas' gradients in the pass that updates its copy.

    replica 0    g0 ──┬─► w0 −= lr · (g0 + g1)/2
                      │
    replica 1    g1 ──┴─► w1 −= lr · (g0 + g1)/2

No sum is stored, nobody waits for one, and there are no buckets. Of n replicas each reads n
gradients, where it would read one sum; that is less work than to store the sums first as long as
there are at most three. Every element is added up in replica order and rounded as it would be in a
bucket, so no bit differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minidist import observe
from minidist.comm import Row
from minidist.comm.row import columns, tell
from minidist.traffic import Outline, Traffic
from minidist.variable import Variable
from minidist.variable_mgr.agreement import Agreement
from minidist.variable_mgr.combine import AllReduce, whole
from minidist.variable_mgr.contribution import Combined, Contribution
from minidist.variable_mgr.group import Group

if TYPE_CHECKING:
    from minidist.optim import Optimizer

MOST = 3  # replicas


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
        """From every replica to all others."""
        if optimizer is not None and optimizer.needs_sums:
            return super().predicted_bytes(rows, optimizer)
        traffic = Traffic()
        for variable in [variable for row in rows for variable in row]:
            nbytes = Outline.of(variable).nbytes
            for copy in variable.copies:
                for device in self._communicator.devices:
                    traffic.go(device, copy.device, nbytes)
        return traffic


def _tell(group: Group, terms: Sequence[Row], sparse: Sequence[int]) -> None:
    """Tell that the device of every copy is going to read all that is not sparse."""
    dense = [i for i in range(len(group.variables)) if i not in sparse]
    for copies in group.copies:
        tell([copies[i].device for i in dense], [], columns(terms, dense))
