"""Agreement: what must be known of all replicas' gradients before they are summed.

How many examples are behind each, which variables have any, and for which all that there is are
IndexedSlices. In one process one look at the contributions tells; several ranks meet for it, once
a step, and find out then whether they do the same: with the same variables and the same optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from minidist.comm.peers import Peers
from minidist.comm.sharing import agree
from minidist.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from minidist.variable_mgr.contribution import Contribution

DENSE, SPARSE, EMPTY = 1, 2, 4  # what there is of a variable's gradients; bits
UNKNOWN = -1  # a count that no replica has given
# Of a rank's buckets: that it has none in this step, or never; all filled, or not to be used.
NO, NEVER, WHOLE, WASTE = range(4)


@dataclass(frozen=True)
class Agreement:
    """What is known of all replicas.

    counts: of examples, for each replica. found: for each variable, DENSE and SPARSE, or EMPTY for
    IndexedSlices behind which there is no example. order: the variables' numbers in the order in
    which the first replica's gradients became final; empty where that was not noted. filled: for
    each rank what has become of its buckets.
    """

    counts: Sequence[int | None]
    found: Sequence[int]
    order: Sequence[int]
    filled: Sequence[int]

    @cached_property
    def used(self) -> list[int]:
        """The variables that any replica has a gradient for."""
        return [i for i, bits in enumerate(self.found) if bits]

    @property
    def begun(self) -> bool:
        """Whether a rank's buckets are being summed."""
        return WHOLE in self.filled or WASTE in self.filled

    @property
    def whole(self) -> bool:
        """Whether all ranks' buckets are filled, so that their sums are being taken."""
        return all(filled == WHOLE for filled in self.filled)

    @cached_property
    def sparse(self) -> frozenset[int]:
        """Those of which all gradients are IndexedSlices, at least one with an example."""
        return frozenset(i for i, bits in enumerate(self.found) if bits & ~EMPTY == SPARSE)


def find(
    contributions: Sequence[Contribution], peers: Peers | None = None, filled: int = NO
) -> Agreement:
    """Return what is known of the contributions of this process, and of those of its peers.

    Raises MergeMismatchError where the peers' differ in what must be the same.
    """
    first = contributions[0]
    counts = [contribution.count for contribution in contributions]
    found = bytearray(len(first.gradients))
    for contribution in contributions:
        sparse = EMPTY if contribution.count == 0 else SPARSE
        for i, gradient in enumerate(contribution.gradients):
            if gradient is not None:
                found[i] |= sparse if isinstance(gradient, IndexedSlices) else DENSE
    if peers is None or peers.count == 1:
        return Agreement(counts, found, first.order, [filled])
    order = first.order if peers.me == 0 else []
    head = np.array([filled, len(counts), len(order)], np.int64).tobytes()
    brought = head + pack(counts) + np.array(order, np.int64).tobytes() + found
    details = [*first.optimizer.settings, *first.group.details]
    every = agree(peers, "apply gradients", details, brought)
    return _together([_opened(each) for each in every])


def pack(counts: Sequence[int | None]) -> bytes:
    """Return counts as bytes."""
    return np.array([UNKNOWN if n is None else n for n in counts], np.int64).tobytes()


def unpack(counts: bytes) -> list[int | None]:
    """Return what `pack` has packed."""
    return [None if n == UNKNOWN else int(n) for n in np.frombuffer(counts, np.int64)]


def _opened(brought: bytes) -> tuple[int, list[int | None], list[int], bytes]:
    filled, n, ordered = np.frombuffer(brought[:24], np.int64)
    orders, rest = 24 + 8 * n, 24 + 8 * (n + ordered)
    order = np.frombuffer(brought[orders:rest], np.int64).tolist()
    return int(filled), unpack(brought[24:orders]), order, brought[rest:]


def _together(every: Sequence[tuple[int, list[int | None], list[int], bytes]]) -> Agreement:
    found = np.bitwise_or.reduce([np.frombuffer(bits, np.uint8) for *_, bits in every])
    return Agreement(
        [count for _, counts, _, _ in every for count in counts],
        found.tolist(),
        every[0][2],
        [filled for filled, *_ in every],
    )
