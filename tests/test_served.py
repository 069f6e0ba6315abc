"""Variables on parameter servers: every policy follows its oracle, bit for bit, at every step."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import ranks
from policies import optimizer
from scenarios import SHAPES, arrays, given_gradients, schedule
from served import ALL_RULES, EVERYTHING, TOGETHER, Trainer, in_workers, oracle

RANKS = 5


def follow(cluster, policy, devices, rules, dtypes):
    """Take some steps with given gradients, by each rule."""
    workers = len(cluster.workers)
    n = workers * devices
    for rule, dtype in itertools.product(rules, dtypes):
        rng = np.random.default_rng(n)
        starts = arrays(rng, SHAPES, dtype)
        decays = [i % 2 == 0 for i in range(len(starts))]
        expected = oracle(policy, rule, starts, workers, devices, weight_decay=0.01, decays=decays)
        opt = optimizer(rule, 0.01)
        with Trainer(cluster, policy, starts, devices, decays=decays) as trainer:
            assert trainer.strategy.num_replicas == n
            trainer.check(starts)
            for counts in schedule(n):
                gradients = given_gradients(rng, SHAPES, dtype, counts, n)
                trainer.apply(opt, gradients, counts)
                expected.step(gradients, counts)
                trainer.check(expected.weights[0], expected.reads[0])
                assert opt.iterations == expected.iterations


def cases():
    found = {}
    shapes = itertools.product((1, 2, 3), (1, 2), (1, 2))
    for number, ((workers, servers, devices), policy) in enumerate(
        itertools.product(shapes, TOGETHER)
    ):
        rules = ALL_RULES if EVERYTHING else [ALL_RULES[number % len(ALL_RULES)]]
        dtypes = ["float32", "float64"] if EVERYTHING else [["float32", "float64"][number % 2]]
        name = f"{policy}-{workers}-{servers}-{devices}"
        fn = partial(follow, policy=policy, devices=devices, rules=rules, dtypes=dtypes)
        found[name] = workers, servers, in_workers(fn)
    return found


CASES = cases()


@pytest.fixture(scope="module")
def outcome(request):
    limit = 600 if EVERYTHING else 100
    return ranks.run(__file__, RANKS, *ranks.chosen(request, CASES), limit=limit)


@pytest.mark.parametrize("case", CASES)
def test_given_gradients_lead_to_the_oracles_bits(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
