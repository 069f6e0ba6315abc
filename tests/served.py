"""The policies of parameter servers: their oracles, and a training in a worker to compare with.

The other sides are oracle.py, in every worker, and a ps that serves.
"""

from __future__ import annotations

import functools
import os

from oracle import RULES, SHARED, STAGED, Oracle, in_order
from policies import CONSTANTS, replica_id, same_bits

import minidist as md

# By the name that tests use: variable_update and the policy's options.
SYNCHRONOUS = {
    "parameter_server": ("parameter_server", {}),
    "parameter_server_device": ("parameter_server", {"local_parameter_device": "device"}),
    "parameter_server_caching": ("parameter_server", {"caching": True}),
    "parameter_server+staged_vars": ("parameter_server", {"staged_vars": True}),
    "distributed_replicated": ("distributed_replicated", {}),
}
ORIGINAL = {
    f"{name}+original": (policy, {**options, "gradient_scale": "original"})
    for name, (policy, options) in SYNCHRONOUS.items()
    if name in ("parameter_server", "parameter_server+staged_vars", "distributed_replicated")
}
TOGETHER = {**SYNCHRONOUS, **ORIGINAL}


def by_worker(workers, devices):
    """Return how the sum is taken: over each worker's replicas, then over the workers."""

    def mean(gradients, counts, r):
        known = counts is not None and len(set(counts)) > 1
        terms = gradients
        if known:
            terms = [r(c) * g for c, g in zip(counts, gradients, strict=True)]
        own = [in_order(terms[w * devices : (w + 1) * devices]) for w in range(workers)]
        return in_order(own), 1 / (sum(counts) if known else len(gradients))

    return mean


class InTurn(Oracle):
    """The ancestors' mixture: each worker's mean is applied, one after the other."""

    def __init__(self, workers, *args, **options):
        super().__init__(*args, **options)
        self.workers = workers

    def step(self, gradients, counts=None):
        if counts is not None and not any(counts):
            return
        devices = len(gradients) // self.workers
        for worker in range(self.workers):
            own = gradients[worker * devices : (worker + 1) * devices]
            columns = zip(*own, strict=True)
            self._apply(0, [(in_order(column), 1 / devices) for column in columns])
        self.weights = [self.weights[0]] * len(self.weights)
        self.history.append(list(self.weights))


def oracle(policy, rule, starts, workers, devices, **options):
    """Return the oracle of a synchronous policy; `starts[i]`."""
    options = {**CONSTANTS[rule], **options}
    starts = [starts] * (workers * devices)
    late = STAGED if "staged" in policy else None
    if policy in ORIGINAL:
        return InTurn(workers, SHARED, rule, starts, late=late, **options)
    return Oracle(SHARED, rule, starts, late=late, combine=by_worker(workers, devices), **options)


class Trainer:
    """A strategy in a worker, with variables that start from `starts[i]`; a context manager.

    Only worker 0's starts count: others' are made wrong here.
    """

    def __init__(self, cluster, policy, starts, devices, *, decays=None, **options):
        name, policy_options = TOGETHER.get(policy, (policy, {}))
        self.cluster, self.n = cluster, devices
        self.strategy = md.Strategy(
            f"cpu*{devices}", name, cluster=cluster, **{**policy_options, **options}
        )
        wrong = 0 if cluster.is_chief else 1
        decays = decays or [True] * len(starts)
        with self.strategy.scope():
            self.variables = [
                md.Variable(start + start.dtype.type(wrong), name=f"v{i}", decays=decays[i])
                for i, start in enumerate(starts)
            ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def each(self, fn):
        """Return what `fn(local number, global number)` returns in each replica here."""
        results = [None] * self.n

        def call():
            local = md.get_replica_context().local_id
            results[local] = fn(local, replica_id())

        self.strategy.run(call)
        return results

    def apply(self, optimizer, gradients, counts=None):
        """Apply given arrays: `gradients[global number][i]`, None where one is not used."""

        def step(local, replica):
            pairs = [
                (None if gradient is None else md.constant(gradient), variable)
                for gradient, variable in zip(gradients[replica], self.variables, strict=True)
            ]
            optimizer.apply_gradients(pairs, count=counts and counts[replica])

        self.each(step)

    def check(self, expected, reads=None):
        """Compare with `expected[i]`, bit for bit, and what replicas read with `reads[i]`."""
        for weights in self.each(lambda *_: [variable.numpy() for variable in self.variables]):
            for variable, read, right in zip(
                self.variables, weights, expected if reads is None else reads, strict=True
            ):
                assert same_bits(read, right), (variable, read, right)
        for variable, right in zip(self.variables, expected, strict=True):
            assert same_bits(variable.numpy(), right), (variable, variable.numpy(), right)
            for copy in variable.copies:
                assert same_bits(copy.array, right), (variable, copy, copy.array, right)


def in_workers(fn):
    """Return a case whose ps serve while its workers call `fn(cluster)`."""

    @functools.wraps(fn)
    def case(cluster):
        if cluster.job == "ps":
            cluster.serve()
            return
        try:
            fn(cluster)
        finally:
            cluster.leave()

    return case


ALL_RULES = list(RULES)
EVERYTHING = os.environ.get("MINIDIST_TEST_ALL") == "1"  # not only a choice of cases
