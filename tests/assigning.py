"""What the tests of variables share: the verbs of assignment, and a look at all copies."""

from __future__ import annotations

import numpy as np
from policies import POLICIES, replica_id

import minidist as md

NONE, SUM, MEAN, FIRST = (
    md.VariableAggregation.NONE,
    md.VariableAggregation.SUM,
    md.VariableAggregation.MEAN,
    md.VariableAggregation.ONLY_FIRST_REPLICA,
)
START = np.array([10.0, 20.0])
VERBS = {
    "assign": lambda old, new: new,
    "assign_add": lambda old, new: old + new,
    "assign_sub": lambda old, new: old - new,
}


def strategy_of(policy, n):
    name, options = POLICIES[policy]
    return md.Strategy(f"cpu*{n}", name, **options)


def variable(strategy, initial_value=START, **options):
    with strategy.scope():
        return md.Variable(initial_value, **{"name": "v", **options})


def in_each(strategy, fn):
    results = [None] * strategy.num_replicas

    def call():
        results[replica_id()] = fn()

    strategy.run(call)
    return results


def check(v, expected):
    """Compare every copy, what every replica reads, and what is read for all, with an array."""
    for component in v.copies:
        np.testing.assert_array_equal(component.array, expected)
    for read in in_each(v.strategy, v.numpy):
        np.testing.assert_array_equal(read, expected)
    np.testing.assert_array_equal(v.numpy(), expected)
