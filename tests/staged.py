"""A training with staged variables in which every number is known."""

from __future__ import annotations

import numpy as np
from policies import STAGING, replica_id

import minidist as md


class Staged:
    """A strategy with one trainable variable w = 0, which each apply lowers by one."""

    def __init__(self, n=2, policy="parameter_server+staged_vars", shape=(), **options):
        name, own = STAGING[policy]
        self.n, self.shape = n, shape
        self.strategy = md.Strategy(f"cpu*{n}", name, **own, **options)
        self.optimizer = md.optim.SGD(1.0)
        self.gradient = md.constant(np.ones(shape))
        self.w = self.variable("w")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def variable(self, name, value=0.0, **options):
        with self.strategy.scope():
            return md.Variable(np.full(self.shape, value), name=name, **options)

    def run(self, *parts):
        """Run functions one after the other in each replica; return what replica 0's return."""
        results = {}

        def step():
            for part in parts:
                result = part()
                if replica_id() == 0:
                    results.setdefault("all", []).append(result)

        self.strategy.run(step)
        return results["all"]

    def apply(self, *variables):
        self.optimizer.apply_gradients([(self.gradient, v) for v in variables or [self.w]])

    def step(self, *before):
        """Run one step; return what w was in it."""
        return self.run(self.read, *before, self.apply)[0]

    def read(self):
        return self.w.numpy().max()

    @property
    def sizes(self):
        return [area.size() for area in self.strategy.variable_mgr.read.areas]

    def synchronize(self):
        """Wait for the copies that are under way."""
        for device in self.strategy.devices:
            device.synchronize()
