"""The policies and optimizers under test by name, and a `Trainer`: minidist's side of a comparison.

The other side is oracle.py.
"""

from __future__ import annotations

import numpy as np
from oracle import INDEPENDENT, RELAXED, SHARED, STAGED, Oracle

import minidist as md

# By the name that tests use: variable_update and the policy's options.
POLICIES = {
    "independent": ("independent", {}),
    "parameter_server": ("parameter_server", {}),
    "parameter_server_device": ("parameter_server", {"local_parameter_device": "device"}),
    "replicated": ("replicated", {}),
}
SYNCHRONOUS = ["parameter_server", "parameter_server_device", "replicated"]
CACHING = {
    "parameter_server_caching": ("parameter_server", {"caching": True}),
    "parameter_server_device_caching": (
        "parameter_server",
        {"caching": True, "local_parameter_device": "device"},
    ),
}
# Those in which something is a step late.
STAGING = {
    "parameter_server+staged_vars": ("parameter_server", {"staged_vars": True}),
    "parameter_server_device+staged_vars": (
        "parameter_server",
        {"staged_vars": True, "local_parameter_device": "device"},
    ),
}
RELAXING = {"replicated+relaxed": ("replicated", {"variable_consistency": "relaxed"})}
LATE = {**STAGING, **RELAXING}
# Those of several workers, which are as `replicated` is where there is one.
ACROSS = {
    "distributed_all_reduce": ("distributed_all_reduce", {}),
    "collective_all_reduce": ("collective_all_reduce", {}),
}
RELAXING_ACROSS = {
    f"{name}+relaxed": (name, {"variable_consistency": "relaxed"}) for name in ACROSS
}
EVERY = {**POLICIES, **CACHING, **LATE}

# Constants that no binary fraction is equal to, so that each rounding shows.
CONSTANTS = {
    "sgd": {"lr": 0.07},
    "momentum": {"lr": 0.07, "momentum": 0.9},
    "nesterov": {"lr": 0.07, "momentum": 0.9},
    "rmsprop": {"lr": 0.007, "decay": 0.9, "momentum": 0.8, "epsilon": 0.013},
    "adam": {"lr": 0.007, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
}
_CLASSES = {
    "sgd": md.optim.SGD,
    "momentum": md.optim.Momentum,
    "nesterov": md.optim.Momentum,
    "rmsprop": md.optim.RMSProp,
    "adam": md.optim.Adam,
}


def optimizer(rule, weight_decay=0.0, **options):
    nesterov = {"nesterov": True} if rule == "nesterov" else {}
    return _CLASSES[rule](**CONSTANTS[rule], **nesterov, weight_decay=weight_decay, **options)


def oracle(policy, rule, starts, **options):
    kind = INDEPENDENT if policy == "independent" else SHARED
    relaxed = policy in RELAXING or policy in RELAXING_ACROSS
    late = STAGED if policy in STAGING else RELAXED if relaxed else None
    return Oracle(kind, rule, starts, late=late, **{**CONSTANTS[rule], **options})


def replica_id():
    return md.get_replica_context().replica_id


class Trainer:
    """A strategy with variables that start from `starts[replica][i]`; a context manager.

    Only `independent` looks at any replica's start but the first. Of the workers of a cluster each
    has its share of the replicas, and knows what these compute. devices: CPUs if not given.
    """

    def __init__(self, policy, starts, *, decays=None, cluster=None, devices=None, **options):
        name, policy_options = {**EVERY, **ACROSS, **RELAXING_ACROSS}[policy]
        self.n = len(starts)
        own = self.n // (1 if cluster is None else len(cluster.workers))
        self.strategy = md.Strategy(
            devices or f"cpu*{own}", name, cluster=cluster, **policy_options, **options
        )
        first = self.strategy.first_replica
        self.here = range(first, first + own)
        decays = decays or [True] * len(starts[0])
        with self.strategy.scope():
            self.variables = [
                md.Variable(
                    _one_after_another([start[i] for start in starts]),
                    name=f"v{i}",
                    decays=decays[i],
                )
                for i in range(len(starts[0]))
            ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def each(self, fn):
        """Return what `fn(replica)` returns in each replica of this process, in their order.

        In the place of other processes' replicas is None.
        """
        results = [None] * self.n

        def call():
            results[replica_id()] = fn(replica_id())

        self.strategy.run(call)
        return results

    def apply(self, optimizer, gradients, counts=None):
        """Apply given arrays: `gradients[replica][i]`, None where a variable is not used."""

        def step(replica):
            pairs = [
                (None if gradient is None else md.constant(gradient), variable)
                for gradient, variable in zip(gradients[replica], self.variables, strict=True)
            ]
            optimizer.apply_gradients(pairs, count=counts and counts[replica])

        self.each(step)

    def weights(self):
        """Return what each replica reads: `[replica][i]`."""
        return self.each(lambda replica: [variable.numpy() for variable in self.variables])

    def check(self, expected, reads=None):
        """Compare all copies with `expected[replica][i]`, bit for bit, and what replicas read.

        The latter with `reads`, where that is something else.
        """
        weights = self.weights()
        for replica in self.here:
            for variable, read, right in zip(
                self.variables, weights[replica], (reads or expected)[replica], strict=True
            ):
                assert same_bits(read, right), (replica, variable, read, right)
        for i, variable in enumerate(self.variables):
            assert len(variable.copies) in (1, len(self.here))
            for replica, copy in zip(self.here, variable.copies, strict=False):
                value = copy.numpy()
                assert same_bits(value, expected[replica][i]), (replica, variable, value)


def _one_after_another(values):
    """Return an initial value that gives each copy that asks for its own the next one."""
    iterator = iter(values)
    return lambda: next(iterator)


def same_bits(a, b):
    """Whether dtype, shape and every bit are the same; so NaN equals itself and 0.0 is not -0.0."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
