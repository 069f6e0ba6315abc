"""Asynchronous workers: what each has read, and when its gradients were applied, explains all bits.

Each gradient depends on the weights that it was computed from. Every worker notes which version of
each variable it has read, and as which version its gradient was applied; so one loop can do the
same arithmetic afterwards, in the order in which the ps did it.
"""

from __future__ import annotations

import itertools
import json
from functools import partial

import numpy as np
import pytest
import ranks
from oracle import RULES, in_order
from policies import CONSTANTS, optimizer, same_bits
from served import EVERYTHING, Trainer, in_workers

import minidist as md
from minidist import observe

RANKS = 5
SHAPES = [(3,), (2, 5), (), (7,)]
STEPS = 6


class Ages(observe.Observer):
    """Notes the age of every gradient by variable, the same for all replicas of a worker."""

    def __init__(self):
        self.by_name = {}

    def applied(self, variable, replica, age):
        self.by_name.setdefault(variable, []).append(age)


def gradient(weights, worker, step, replica):
    """Return a gradient that depends on everything."""
    rng = np.random.default_rng([worker, step, replica])
    r = weights.dtype.type
    return r(rng.normal()) + r(0.1) * weights


def explain(cluster, bound, devices, rule):
    """Take steps without waiting for others, and explain what came of it."""
    workers, me = len(cluster.workers), cluster.task
    starts = [np.full(shape, 0.5, np.float32) for shape in SHAPES]
    opt = optimizer(rule)
    options = {"cross_replica_sync": False, "staleness_bound": bound}
    notes = []
    with Trainer(cluster, "parameter_server", starts, devices, **options) as trainer:
        for step in range(STEPS + me):  # others take more steps than worker 0
            ages = Ages()
            with observe.attached(ages):
                seen = [variable.copies[0].version for variable in trainer.variables]
                read = [variable.numpy() for variable in trainer.variables]
                trainer.each(partial(take, trainer.variables, opt, me, step))
            applied = [
                version + only(ages.by_name[variable.name], devices)
                for version, variable in zip(seen, trainer.variables, strict=True)
            ]
            notes.append([seen, applied, [array.tolist() for array in read]])
            if bound is not None:
                most = (workers - 1) * (2 * bound + 1)
                assert all(0 <= age <= most for ages in ages.by_name.values() for age in ages)
        trainer.strategy.variable_mgr.servers.pull()
        last = [variable.copies[0].version for variable in trainer.variables]
        notes.append([last, None, [variable.numpy().tolist() for variable in trainer.variables]])
    every = cluster.peers(lambda: (5, 60)).meet("compare notes", json.dumps(notes).encode())
    check([json.loads(each) for each in every], starts, rule, devices)


def take(variables, opt, worker, step, replica, _):
    pairs = [
        (md.constant(gradient(variable.numpy(), worker, step, replica)), variable)
        for variable in variables
    ]
    opt.apply_gradients(pairs)


def only(ages, devices):
    assert len(ages) == devices
    assert len(set(ages)) == 1
    return ages[0]


def check(every, starts, rule, devices):
    """Do it all again in one loop, and compare what every worker has read."""
    for i, start in enumerate(starts):
        pushes = [
            (applied[i], seen[i], worker, step)
            for worker, notes in enumerate(every)
            for step, (seen, applied, _) in enumerate(notes[:-1])
        ]
        history, slots = [start], {}
        for number, (applied, seen, worker, step) in enumerate(sorted(pushes)):
            assert applied == number  # each was applied once, one after the other
            r = start.dtype.type
            own = [gradient(history[seen], worker, step, replica) for replica in range(devices)]
            mean = in_order(own) * r(1 / devices)
            new = RULES[rule](history[-1], mean, slots, number + 1, CONSTANTS[rule], r)
            history.append(np.asarray(new))
        for notes in every:
            for seen, _, read in notes:
                assert same_bits(np.array(read[i], start.dtype), history[seen[i]])


CASES = {
    f"{workers}-{servers}-{devices}-{bound}": (
        workers,
        servers,
        in_workers(
            partial(
                explain,
                bound=bound,
                devices=devices,
                rule=list(RULES)[(workers + servers + devices + number) % len(RULES)],
            )
        ),
    )
    for number, (bound, workers, servers, devices) in enumerate(
        itertools.product((None, 0, 1, 3), (1, 2, 3), (1, 2), (1, 2))
    )
    if EVERYTHING or devices == 1 + number // 2 % 2
}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, RANKS, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_all_that_workers_read_is_explained(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
