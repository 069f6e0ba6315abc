"""Values across workers: what is for all replicas is for those of all workers.

The programs come to the same bits as in one process with all the devices; see same_program.py.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import ranks
from same_program import compare

import minidist as md
from minidist import nn, ops
from minidist.random import stream
from minidist.variable import Variable

SITES = [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2), (1, 3), (2, 1, 2)]  # devices of each worker
WORKERS = 3
ON_READ = md.VariableSynchronization.ON_READ
SUM, MEAN = md.VariableAggregation.SUM, md.VariableAggregation.MEAN
FIRST, NONE = md.VariableAggregation.ONLY_FIRST_REPLICA, md.VariableAggregation.NONE


def me():
    return md.get_replica_context().replica_id


def rows(index, values, shape=(7, 2)):
    values = md.constant(np.asarray(values, np.float32))
    return md.IndexedSlices(values, md.constant(np.asarray(index)), shape)


def reductions(strategy, log):
    """Sums and means of all kinds of leaves, at once and one by one."""

    def body():
        i = me()
        rng = np.random.default_rng(i)
        table = rows([i, 3], rng.normal(size=(2, 2)))
        return {
            "int": i + 1,
            "same": 64,
            "float": 0.1 * (i + 1),
            "bool": i == 0,
            "tensor": md.constant(rng.normal(size=(3, 2)).astype(np.float32)),
            "double": md.constant(rng.normal(size=5)),
            "whole": md.constant(np.arange(3) + i),
            "flags": md.constant(np.array([True, i == 1])),
            "half": md.constant(rng.normal(size=4).astype(np.float16)),
            "rows": table,
            "rows or all": table if i % 2 == 0 else table.to_dense(),
        }

    values = strategy.run(body)
    with strategy.scope():
        for op in ("sum", "mean"):
            whole = strategy.reduce(op, values)
            log.share(*whole.values())
            log.share(strategy.reduce(op, values["tensor"], axis=0))
            log.share(strategy.reduce(op, values["half"], axis=0))
            log.share(strategy.reduce(op, values["whole"], axis=-1))
            log.share(strategy.reduce(op, values["tensor"], destinations="cpu:0"))
            there = strategy.reduce(op, values["double"], destinations=strategy.devices)
            log.share(strategy.local_results(there)[-1])
            pairs = [(values["tensor"], "cpu:0"), (values["whole"], None), (values["rows"], None)]
            log.share(*strategy.batch_reduce(op, pairs))
        log.share(strategy.reduce("sum", 0))
        w = md.Variable(np.array([0.1, 0.2, 0.3]), name="w")
        log.share(strategy.reduce("mean", w))


def uneven(strategy, log):
    """Over an axis a mean is over all elements of all replicas, though these have other numbers."""

    def body():
        return md.constant(np.random.default_rng(me()).normal(size=(me() % 3, 2)))

    values = strategy.run(body)
    log.share(strategy.reduce("mean", values, axis=0))
    log.share(strategy.gather(values, axis=0))
    log.share(strategy.gather({"a": strategy.run(lambda: md.constant([[me()]] * 2))}, axis=1)["a"])


def all_reductions(strategy, log):
    """all_reduce in replicas, and the gradients that a tape has of it."""
    with strategy.scope():
        v = md.Variable(np.array([1.0, 2.0]), name="v")

    def body():
        ctx = md.get_replica_context()
        x = md.constant(np.array([1.5, 0.1]) * (me() + 1))
        with md.GradientTape() as tape:
            tape.watch(x)
            total = ctx.all_reduce("sum", x * v)
            loss = ops.reduce_sum(ops.square(total)) * (me() + 1.0)
        log.note(total, *tape.gradient(loss, [x, v]))
        log.note(ctx.all_reduce("mean", {"a": v, "b": [me(), 0.3 * me()]})["b"])

    strategy.run(body)


def assignments(strategy, log):
    """What replicas assign becomes one value, as the aggregation says."""
    with strategy.scope():
        variables = {
            how: md.Variable(np.zeros(3), name=how.name, aggregation=how)
            for how in (SUM, MEAN, FIRST)
        }
        whole = md.Variable(np.zeros(2, np.int64), name="whole", aggregation=SUM)
        named = md.Variable(0.0, name="first", aggregation=FIRST)

    def body():
        rng = np.random.default_rng(me())
        for v in variables.values():
            v.assign(md.constant(rng.normal(size=3)))
            v.assign_add(rng.normal(size=3))
            v.assign_sub(v * 0.3)
            log.note(v)
        variables[MEAN].assign_add(np.full(3, 0.1) if me() else md.constant(np.full(3, 0.7)))
        whole.assign_add(np.array([1, 1]))
        whole.assign_sub(np.array([me(), 2]))
        named.assign(me() + 3)
        named.assign_add(0.1 * me() + 1)
        log.note(variables[MEAN], whole, named)

    strategy.run(body)
    with strategy.scope():
        named.assign(7)
    log.share(*variables.values(), whole, named)


def shared_by_identity(strategy, log):
    """One object in all replicas is one value; so a mean of it is itself."""
    with strategy.scope():
        v = md.Variable(np.zeros(2), name="v", aggregation=MEAN)
    constant = md.constant(np.array([0.1, 0.7]))

    def body():
        v.assign(constant)

    strategy.run(body)
    log.share(v, strategy.reduce("mean", constant))


def own_values(strategy, log):
    """Each replica assigns its own; read for all they are one, as the aggregation says."""
    with strategy.scope():
        variables = [
            md.Variable(
                np.array([0.1, 2.0]), name=f"{how}", synchronization=ON_READ, aggregation=how
            )
            for how in (SUM, MEAN, FIRST, NONE)
        ]
        whole = md.Variable(5, name="whole", synchronization=ON_READ, aggregation=SUM)

    def body():
        for v in variables:
            v.assign_add(np.array([0.3, 0.1]) * me())
            log.note(v)
        whole.assign_sub(me() + 1)

    strategy.run(body)
    with strategy.scope():
        log.share(*variables[:3], whole)
        variables[0].assign([0.7, 0.1])
        variables[1].assign([0.7, 0.1])
        variables[1].assign_add([0.2, 0.2])
        whole.assign(11)
        log.share(*variables[:2], whole)
    strategy.run(lambda: log.note(*variables, whole))
    strategy.run(lambda: md.get_replica_context().merge_call(lambda s: log.share(*variables[:3])))


def averages(strategy, log):
    """Moving averages follow the mean over all replicas, weighted by their counts."""
    with strategy.scope():
        a, b = md.Variable(np.ones(2), name="a"), md.Variable(0.5, name="b")
        c, steps = md.Variable(np.zeros(2), name="c"), md.Variable(0, name="steps")

    def body(step):
        from minidist.moving_average import assign_moving_averages

        x = md.constant(np.array([0.1, 0.7]) * (me() + step))
        counts = [1, (me() + step) % 3, int(me() == 1), 0]
        values = [x, 0.1 * me() + 0.3]
        assign_moving_averages([a, b], values, 0.9, count=counts[step])
        assign_moving_averages([a, b], values, 0.9, count=[counts[step], 2 * me()])
        assign_moving_averages([c], [x], 0.9, updates=steps)

    for step in range(4):
        strategy.run(body, step)
        log.share(a, b, c, steps)


def metrics(strategy, log):
    """Ratios of sums over everything that all replicas have seen."""
    with strategy.scope():
        mean, accuracy = md.metrics.Mean("mean"), md.metrics.Accuracy("accuracy")

    def body():
        rng = np.random.default_rng(me())
        mean.update(rng.normal(size=me() + 1), weights=0.3)
        scores = rng.normal(size=(4, 3))
        accuracy.update(rng.integers(3, size=4), scores)
        log.note(mean.result())
        return md.constant(rng.normal(size=2))

    values = strategy.run(body)
    log.share(mean.result(), accuracy.result())
    mean.update(values)
    log.share(mean.result())
    mean.reset()
    log.share(mean.result())


def counting(strategy, log):
    """increment_var counts once for all; one function sees each step's outputs of all."""
    with strategy.scope():
        step = md.Variable(0, name="step")

    def body(x):
        md.increment_var(step, 2)
        return ops.reduce_sum(x) * (me() + 1.0)

    def one(ctx, x):
        out = strategy.run(body, x)
        ctx.set_last_step_output("sum", out, "sum")
        ctx.set_last_step_output("mean", out, "mean")
        strategy.run(lambda: ctx.set_last_step_output("own", md.constant(1.5 * me()), "mean"))

    n = strategy.num_replicas
    batches = [np.arange(2.0 * n).reshape(2 * n, 1) + k for k in range(3)]
    ctx = strategy.run_steps(one, strategy.distribute_dataset(batches), iterations=3)
    log.share(step, *(ctx.last_step_outputs[name] for name in ("sum", "mean", "own")))


def creation(strategy, log):
    """Random initial values, made outside and in replicas; layers; copies by deepcopy."""
    with strategy.scope():
        dense = nn.Dense(3)
        dense.build((2,))
    made = []

    def body():
        v = md.Variable(lambda: nn.glorot_uniform()((2, 2), "float32", stream(3)), name="w")
        own = md.Variable(float(me()), name="own", synchronization=ON_READ, aggregation=SUM)
        log.note(v, own, v.name)
        made.append(v)

    strategy.run(body)
    log.share(*dense.variables, made[0])


def updates(strategy, log):
    """update is a call for each copy, with what reduce has made for all of them."""
    with strategy.scope():
        v = md.Variable(np.ones(2), name="v")

    def merge(strategy, x):
        total = strategy.reduce("sum", x, destinations=v)
        strategy.update(v, lambda copy, x: copy.assign_add(x * 0.1), total)

    def body():
        x = md.constant(np.array([1.0, 2.0]) * (me() + 1))
        md.get_replica_context().merge_call(merge, x)
        log.note(v)

    strategy.run(body)
    log.share(v)


PROGRAMS = [
    reductions,
    uneven,
    all_reductions,
    assignments,
    own_values,
    averages,
    metrics,
    counting,
    creation,
    updates,
]


# --- what one process has not -------------------------------------------------------------------


def start_from_the_first(cluster):
    """A variable starts from worker 0's value, whatever the others would give it."""
    with md.Strategy("cpu*2", "collective_all_reduce", cluster=cluster) as strategy:
        with strategy.scope():
            v = md.Variable(np.full(3, float(cluster.task)), name="v")
            small = md.Variable(lambda: np.full(2, cluster.task + 0.5), name="small")
            large = md.Variable(np.full(30_000, cluster.task), name="large")
            own = md.Variable(cluster.task, name="own", synchronization=ON_READ, aggregation=SUM)
        for variable, first in ((v, 0), (small, 0.5), (large, 0), (own.get("cpu:0"), 0)):
            assert (variable.numpy() == first).all(), variable
        assert all(isinstance(variable, Variable) for variable in (v, small, large, own))


def merge_once(cluster):
    """A merge function runs once in each worker, and sees its replicas."""
    calls = []
    with md.Strategy("cpu*2", "collective_all_reduce", cluster=cluster) as strategy:

        def merge(strategy, x):
            calls.append(strategy.local_results(x))
            return strategy.reduce("sum", x)

        def body():
            return float(md.get_replica_context().merge_call(merge, md.constant(me() + 1.0)))

        first = strategy.first_replica
        n = strategy.num_replicas
        assert strategy.run(body).values == (n * (n + 1) / 2,) * 2
        ((a, b),) = calls
        assert (float(a), float(b)) == (first + 1, first + 2)


def what_is_the_same(cluster):
    """One object in all replicas of every worker is one value only if it is the same in all."""
    with md.Strategy("cpu*2", "collective_all_reduce", cluster=cluster) as strategy:
        same, other = md.constant(np.array([0.1, 0.7])), md.constant(1.0 + cluster.task)
        assert float(strategy.reduce("mean", same)[0]) == np.float64(0.1)
        with pytest.raises(ValueError, match="is the same in all 4 replicas"):
            strategy.reduce("sum", same)
        assert float(strategy.reduce("sum", other)) == 1 + 1 + 2 + 2
        assert float(strategy.reduce("mean", other)) == 1.5
        assert strategy.reduce("sum", 0) == 0
        with strategy.scope():
            mean = md.metrics.Mean()
        mean.update([1.0, 4.0])
        mean.update(strategy.run(lambda: md.constant(float(me()))))
        assert mean.result() == (1 + 4 + 0 + 1 + 2 + 3) / 6


def as_one(program, site):
    return len(site), 0, partial(compare, program, site, "collective_all_reduce")


CASES = {
    f"{program.__name__} {'+'.join(map(str, site))}": as_one(program, site)
    for program in PROGRAMS
    for site in SITES
}
CASES |= {
    f"shared_by_identity {'+'.join(map(str, site))}": as_one(shared_by_identity, site)
    for site in ((2, 2), (2, 2, 2), (2, 1))
}
CASES |= {fn.__name__: (2, 0, fn) for fn in (start_from_the_first, merge_once, what_is_the_same)}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, WORKERS, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_all_workers(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
