"""All-reduce policies over several workers: the oracle's bits at every step, in every worker.

The number of workers and that of each one's devices change nothing: only their product counts.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import ranks
from oracle import RULES
from policies import Trainer, optimizer, oracle
from same_program import compare
from scenarios import DTYPES, SHAPES, arrays, given_gradients, schedule

import minidist as md
from minidist import nn, ops, train

SITES = [(2,), (1, 1), (2, 2), (1, 1, 1), (2, 2, 2)]  # how many devices each worker has
UNEQUAL = [(2, 1), (1, 3, 2)]
WORKERS = 3
POLICIES = ["distributed_all_reduce", "collective_all_reduce", "collective_all_reduce+relaxed"]
BUCKETS = {"overlap": True, "bucket_cap_mb": 1e-9}
WAYS = {  # options of a policy that change no bit
    "": {"overlap": False},
    " in buckets": BUCKETS,
    " relaxed in buckets": {**BUCKETS, "variable_consistency": "relaxed"},
}


def follow_the_oracle(policy, devices, cluster):
    n = sum(devices)
    for rule in RULES if policy == "collective_all_reduce" else ["nesterov"]:
        for dtype in DTYPES:
            rng = np.random.default_rng(n)
            starts = [arrays(rng, SHAPES, dtype)] * n
            expected = oracle(policy, rule, starts, weight_decay=0.01)
            opt = optimizer(rule, 0.01)
            with Trainer(policy, starts, cluster=cluster) as trainer:
                trainer.check(expected.weights)
                for counts in schedule(n):
                    gradients = given_gradients(rng, SHAPES, dtype, counts, n)
                    if counts is not None and 0 in counts:  # who has no example has no say
                        gradients[counts.index(0)] = [np.full_like(w, np.nan) for w in starts[0]]
                    trainer.apply(opt, gradients, counts)
                    if counts is not None and 0 in counts:
                        gradients[counts.index(0)] = [np.zeros_like(w) for w in starts[0]]
                    expected.step(gradients, counts)
                    trainer.check(expected.weights)
                    assert opt.iterations == expected.iterations


def train_some(strategy, log):
    """Train by `minimize`, with unused variables, other counts in every step, and rows."""
    rng = np.random.default_rng(3)
    n, shapes = strategy.num_replicas, [(5,), (), (3, 4), (20_000,), (2,), (9, 3)]
    with strategy.scope():
        variables = [md.Variable(rng.normal(size=s), name=f"v{i}") for i, s in enumerate(shapes)]
    opt = md.optim.Adam(0.01, weight_decay=0.01, gradient_clip_norm=5.0)
    schedules = [None, [1 + i % 3 for i in range(n)], [i % 2 for i in range(n)], [0] * n, None]
    for step, counts in enumerate([*schedules, [4] * n]):
        data = rng.normal(size=(n, len(shapes)))
        for replica in range(n):
            if counts is not None and not counts[replica]:
                data[replica] = np.nan  # who has no example has no say

        def body(step=step, counts=counts, data=data):
            me = md.get_replica_context().replica_id

            def loss():
                total = md.constant(0.0, "float64")
                for i, variable in enumerate(variables):
                    if (step + i + me) % 4 == 1 or (step == 4 and i == 1):
                        continue
                    if i == 5:  # a table, of which some replicas read rows and some all
                        rows = np.array([step, me % 9, step])
                        variable = variable if step == 4 and me else ops.embedding(variable, rows)
                    total = total + ops.reduce_sum(ops.square(variable)) * data[me, i]
                return total

            opt.minimize(loss, variables, count=counts and counts[me])

        strategy.run(body)
        log.share(*variables)
    log.share(opt.iterations)


def train_otherwise(strategy, log):
    """In turn: minimize, apply_gradients in one replica, distributed_apply, accumulation."""
    n = strategy.num_replicas
    with strategy.scope():
        a, b = md.Variable(np.arange(4.0), name="a"), md.Variable(np.ones(3), name="b")
    opt = md.optim.Momentum(0.05)
    slow = md.optim.Momentum(0.05, gradient_accumulation_steps=2)

    def body(step):
        me = md.get_replica_context().replica_id

        def loss():
            return ops.reduce_sum(ops.square(a) * (me + 1.0)) + ops.reduce_sum(b * step)

        if step > 1 and me == step % n:  # the others' buckets are filled in vain
            with md.GradientTape() as tape:
                value = loss()
            opt.apply_gradients(zip(tape.gradient(value, [a, b]), [a, b], strict=True))
        else:
            opt.minimize(loss, [a, b])

    def gradients():
        me = md.get_replica_context().replica_id
        return md.constant(np.full(4, me + 0.5)), md.constant(np.full(3, 1.0 / (me + 1)))

    for step in range(5):
        strategy.run(body, step)
        log.share(a, b)
        both = strategy.run(gradients)
        with strategy.scope():
            opt.distributed_apply(zip(both, [a, b], strict=True))
        log.share(a, b)

    def accumulate(step):
        me = md.get_replica_context().replica_id
        slow.minimize(lambda: ops.reduce_sum(ops.square(b) * (me + step)), [b], count=me + step)

    for step in range(4):
        strategy.run(accumulate, step)
        log.share(b, slow.iterations)


def train_a_model(strategy, log):
    """A model with dropout and batch normalisation: the same random numbers, the same averages."""
    rng = np.random.default_rng(8)
    with strategy.scope():
        layers = [nn.Dense(6), nn.BatchNorm(), nn.ReLU(), nn.Dropout(0.3), nn.Dense(3)]
        model = nn.Sequential(layers, name="model")
        model.build((4,))
    opt = md.optim.Momentum(0.1, loss_scale=md.optim.LossScale(8.0, automatic=True, every_n=1))
    batches = [
        (rng.normal(size=(size, 4)).astype(np.float32), rng.integers(3, size=size))
        for size in [13, 7, 2]
    ]
    for images, labels in strategy.distribute_dataset(batches):
        results = strategy.run(train.train_step, model, opt, images, labels, accuracy=True)
        every = train.all_results(strategy, strategy.local_results(results))
        log.share(train.mean_loss(every), train.Accuracy.of(every).top_1, len(every))
    log.share(*model.variables, opt.current_loss_scale, opt.iterations)
    accuracy = train.evaluate(strategy, model, batches)
    log.share(accuracy.top_1, accuracy.top_5, accuracy.count)
    sums = train.weights_checksums(strategy, model)
    assert len(sums) == strategy.num_replicas and len(set(sums)) == 1
    log.share(sums)


def original_scale(strategy, log):
    """The ancestors' sum over replicas, which disregards counts."""
    with strategy.scope():
        v = md.Variable(np.arange(3.0), name="v")
    opt = md.optim.SGD(0.1)

    def body():
        me = md.get_replica_context().replica_id
        opt.apply_gradients([(md.constant(np.full(3, me + 1.0)), v)], count=me)

    strategy.run(body)
    log.share(v)


def independents(strategy, log):
    """Every replica trains a model of its own, from random values of its own."""
    with strategy.scope():
        layers = [nn.Dense(3), nn.Dropout(0.3), nn.Dense(2)]
        model = nn.Sequential(layers, name="model")
        model.build((4,))
    opt = md.optim.Adam(0.1, loss_scale=md.optim.LossScale(8.0, automatic=True, every_n=1))

    def body(step):
        me = md.get_replica_context().replica_id
        rng = np.random.default_rng(10 * me + step)
        x = md.constant(rng.normal(size=(3, 4)).astype(np.float32))

        def loss():  # which overflows in one replica: no replica's scale may grow then
            huge = np.inf if step == me == 1 else 1.0
            return ops.reduce_mean(model(x, training=True)) * huge

        opt.minimize(loss, model.trainable_variables)
        log.note(*model.variables, opt.current_loss_scale, opt.iterations)

    for step in range(3):
        strategy.run(body, step)
    log.share(*[strategy.reduce("mean", variable) for variable in model.variables])


def strategies_that_also_reduce(cluster):
    """Relaxed sums and the strategy's own, both by MPI's collectives: each makes its communicator.

    They do so in two threads at the same time, in an order of chance that must not matter.
    """
    for _ in range(6):
        options = {"all_reduce_spec": "collective", "variable_consistency": "relaxed"}
        with md.Strategy(
            "cpu", "collective_all_reduce", cluster=cluster, deadline=20, overlap=False, **options
        ) as strategy:
            with strategy.scope():
                w = md.Variable(np.zeros(1000), name="w")
            opt = md.optim.SGD(1.0)

            def body(opt=opt, w=w):
                opt.minimize(lambda: ops.reduce_sum(w), [w])
                return md.constant(float(cluster.task))

            for _ in range(3):
                each = strategy.run(body)
                mean = strategy.reduce("mean", each)
                assert float(mean) == (len(cluster.workers) - 1) / 2
        assert np.unique(w.numpy()).tolist() == [-2]  # the sums of the last step are for a next one


def name(workers):
    return "+".join(map(str, workers))


CASES = {
    f"{policy} {name(site)}": (len(site), 0, partial(follow_the_oracle, policy, site))
    for policy in POLICIES
    for site in SITES
}
for site in [*SITES, *UNEQUAL]:
    for way, options in WAYS.items():
        for program in (train_some, train_otherwise, train_a_model):
            if program is train_a_model and way == " in buckets":
                continue
            CASES[f"{program.__name__}{way} {name(site)}"] = (
                len(site),
                0,
                partial(compare, program, site, "collective_all_reduce", **options),
            )
for site in ((2, 2, 2), (1, 1)):
    CASES[f"original_scale {name(site)}"] = (
        len(site),
        0,
        partial(compare, original_scale, site, "distributed_all_reduce", gradient_scale="original"),
    )
    CASES[f"independents {name(site)}"] = (
        len(site),
        0,
        partial(compare, independents, site, "independent"),
    )
CASES["strategies_that_also_reduce 1+1"] = (2, 0, strategies_that_also_reduce)


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, WORKERS, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_several_workers_are_as_one(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
