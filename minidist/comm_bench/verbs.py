"""Verbs: what replicas do together, what each of them gives and gets, and what must come out.

With n replicas and buffers of N elements:

| verb | a replica gives | gets | bytes that count | bus bandwidth |
|---|---|---|---|---|
| all_reduce | N | N, the sum | N | × 2(n−1)/n |
| reduce | N | N at the root, the sum | N | × 1 |
| broadcast | N at the root | N, the root's | N | × 1 |
| all_gather | N/n | N, everybody's in order | N | × (n−1)/n |
| reduce_scatter | N | N/n, its part of the sum | N | × (n−1)/n |

Bandwidths are by the definitions of nccl-tests (its doc/PERFORMANCE.md): algbw is bytes by time,
and busbw is what a link must have carried, at best, whatever the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """sums: whether values are added up. parts: whether a replica gives or gets only its part.

    bus: by the number of replicas, what the algorithm bandwidth is multiplied with.
    """

    name: str
    sums: bool
    parts: bool
    bus: Callable[[int], float]


VERBS = {
    verb.name: verb
    for verb in (
        Verb("all_reduce", True, False, lambda n: 2 * (n - 1) / n),
        Verb("reduce", True, False, lambda n: 1.0),
        Verb("broadcast", False, False, lambda n: 1.0),
        Verb("all_gather", False, True, lambda n: (n - 1) / n),
        Verb("reduce_scatter", True, True, lambda n: (n - 1) / n),
    )
}
