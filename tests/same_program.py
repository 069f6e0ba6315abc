"""The same program in several workers and in one process with all their devices: the same bits.

A program is a function of a strategy and a Log, into which it puts what it comes to.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from policies import same_bits

import minidist as md
from minidist.cluster.cluster import alone


class Log:
    """What a program comes to: `own` for each replica, `shared` for all."""

    def __init__(self):
        self.shared = []
        self.own = defaultdict(list)

    def share(self, *values):
        """Note values for all replicas; called outside of replicas."""
        self.shared += [plain(value) for value in values]

    def note(self, *values):
        """Note values of this replica; called in one."""
        self.own[md.get_replica_context().replica_id] += [plain(value) for value in values]


def plain(value):
    """Return a copy as NumPy arrays and Python's numbers."""
    if isinstance(value, md.Mirrored):
        return plain(value.values[0])
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, md.IndexedSlices):
        return [value.values.numpy(), value.indices.numpy()]
    if hasattr(value, "numpy"):
        return np.array(value.numpy())
    return value.copy() if isinstance(value, np.ndarray) else value


def alike(a, b):
    """Whether two plain values are the same to the last bit."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return same_bits(a, b)
    return type(a) is type(b) and a == b


def run_in(cluster, devices, policy, program, **options):
    """Return the Log of a program under a policy."""
    log = Log()
    md.context.seed(5)
    with md.Strategy(f"cpu*{devices}", policy, cluster=cluster, **options) as strategy:
        program(strategy, log)
    return log


def compare(program, devices, policy, cluster, **options):
    """Run a program in a cluster, with these numbers of devices, and in this process with all.

    Fails unless both come to the same.
    """
    own = devices[cluster.task]
    ours = run_in(cluster, own, policy, program, **options)
    whole = run_in(alone(), sum(devices), policy, program, **options)
    assert ours.shared or ours.own
    assert len(ours.shared) == len(whole.shared)
    for i, (a, b) in enumerate(zip(ours.shared, whole.shared, strict=True)):
        assert alike(a, b), (i, a, b)
    if ours.own:
        first = sum(devices[: cluster.task])
        assert sorted(ours.own) == list(range(first, first + own))
    for replica, values in ours.own.items():
        theirs = whole.own[replica]
        assert len(values) == len(theirs), (replica, values, theirs)
        for i, (a, b) in enumerate(zip(values, theirs, strict=True)):
            assert alike(a, b), (replica, i, a, b)
