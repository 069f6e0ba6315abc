"""What goes wrong in one worker reaches all others, as an error that names it; nothing hangs."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from functools import partial

import numpy as np
import pytest
import ranks

import minidist as md
from minidist import ops
from minidist.errors import HangError, MergeMismatchError, PeerError, ShapeError, UsageError
from minidist.moving_average import assign_moving_average

WORKERS = 3
STEPS = 4
PLANTED = 1  # the step in which something goes wrong
POLICY = "collective_all_reduce"
OVERLAP = {"overlap": True, "bucket_cap_mb": 1e-9}
ON_READ = md.VariableSynchronization.ON_READ
SUM, MEAN = md.VariableAggregation.SUM, md.VariableAggregation.MEAN
FAR = 20  # seconds: a deadline that no test comes to


def me():
    return md.get_replica_context().replica_id


def words(failure):
    return "\n".join([str(failure), *getattr(failure, "__notes__", ())])


def caught(fn, *args):
    """Return what a function raises."""
    try:
        fn(*args)
    except BaseException as failure:
        return failure
    raise AssertionError(f"{fn} has raised nothing")


def expect(failure, kind, pattern):
    assert type(failure) is kind and re.search(pattern, words(failure)), (failure, words(failure))


class Training:
    """A training of two variables in which the last worker's last replica fails in a phase."""

    def __init__(self, cluster, phase, devices, **options):
        self.strategy = md.Strategy(
            f"cpu*{devices}", POLICY, cluster=cluster, deadline=FAR, **options
        )
        with self.strategy.scope():
            self.a = md.Variable(np.ones(3), name="a")
            self.b = md.Variable(np.ones(20_000), name="b")
        self.opt = md.optim.Momentum(0.1)
        self.phase = phase
        self.culprit = cluster.task == len(cluster.workers) - 1
        self.last = self.strategy.num_replicas - 1

    def fails(self, phase):
        if self.failing and self.phase == phase and me() == self.last:
            raise ZeroDivisionError(f"planted in {phase}")

    def body(self):
        def loss():
            self.fails("forward")
            x = ops.reduce_sum(ops.square(self.a))

            def backward(dy, needs):
                self.fails("backward")
                return [dy]

            y = md.tape.record(x.array, (x,), backward)
            return y + ops.reduce_sum(self.b)

        self.opt.minimize(loss, [self.a, self.b])
        self.fails("after the update")
        md.get_replica_context().merge_call(self.merge)

    def merge(self, strategy):
        if self.failing and self.phase == "merge":
            raise ZeroDivisionError("planted in merge")

    def step(self, step):
        self.failing = self.culprit and step == PLANTED
        if self.failing and self.phase in ("sum", "update"):
            self.break_parts()
        self.strategy.run(self.body)
        if self.failing and self.phase == "between":
            raise ZeroDivisionError("planted in between")

    def break_parts(self):
        def broken(*args, **kwargs):
            raise ZeroDivisionError(f"planted in {self.phase}")

        if self.phase == "sum":
            self.strategy.variable_mgr.combine.sums.sum_into = broken
        else:
            self.opt.update = broken

    def steps(self):
        for step in range(STEPS):
            self.step(step)

    def steps_and_close(self):
        with self.strategy:
            self.steps()


def a_worker_fails(phase, devices, options, cluster):
    training = Training(cluster, phase, devices, **options)
    failure = caught(training.steps_and_close if phase == "between" else training.steps)
    if training.culprit:
        expect(failure, ZeroDivisionError, f"planted in {phase}")
        if phase in ("forward", "backward", "after the update"):
            n = training.strategy.num_replicas
            assert f"raised in replica {n - 1} of {n}, on cpu:{devices - 1}" in words(failure)
    else:
        who = f"worker:{len(cluster.workers) - 1}"
        expect(failure, PeerError, rf"{who} \(on .*\) has failed .*ZeroDivisionError: planted in")
    if phase != "between":
        again = caught(training.step, STEPS)
        expect(again, PeerError, "out of step since.*planted in.*make a new strategy")
        training.strategy.close()


def one_leaves_early(options, cluster):
    """A worker that takes fewer steps, and closes its strategy."""
    training = Training(cluster, "none", 1, **options)
    with training.strategy:
        for step in range(2):
            training.step(step)
        if cluster.task == 1:
            return
        failure = caught(training.step, 2)
    expect(
        failure,
        PeerError,
        r"worker:1 \(on .*\) has ended after \d+ meetings, and worker:0 wants to .*; all ranks "
        "must take the same number of steps",
    )


def told(strategy):
    """Return once the other workers have said that they have failed, with what they said."""
    tick = threading.Event()
    while True:
        try:
            strategy.site.peers.check("hang")
        except PeerError as failure:
            return failure
        tick.wait(0.02)


def one_hangs(devices, cluster):
    """A report, and then an error that names the worker for which the others wait."""
    reports = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())
    logging.getLogger("minidist").addHandler(handler)
    hangs = cluster.task == 1
    with md.Strategy(f"cpu*{devices}", POLICY, cluster=cluster, deadline=FAR) as strategy:
        strategy.reduce("sum", 0)  # all are there
        strategy._report_after, strategy._deadline = (FAR, FAR) if hangs else (0.2, 1.0)

        def body():
            if hangs:
                raise told(strategy)
            return md.get_replica_context().all_reduce("sum", md.constant(1.0))

        failure = caught(strategy.run, body)
    logging.getLogger("minidist").removeHandler(handler)
    if hangs:
        expect(failure, PeerError, r"worker:[02] \(on .*\) has failed .*HangError")
        return
    waited = rf"worker:{cluster.task} has waited for worker:1 \(on .*\) to reduce, in meeting"
    expect(failure, HangError, waited)
    assert any(re.search(waited, report) for report in reports), reports
    assert "was still running" not in words(failure)


def one_hangs_in_buckets(cluster):
    """The same where the others wait for it on their communication streams."""
    hangs = cluster.task == 1
    training = Training(cluster, "none", 2, **OVERLAP)
    strategy = training.strategy
    with strategy:
        training.step(0)
        strategy._deadline = FAR if hangs else 1.0

        def body():
            if hangs:
                raise told(strategy)
            training.body()

        failure = caught(strategy.run, body)
    if hangs:
        expect(failure, PeerError, r"worker:0 \(on .*\) has failed .*HangError")
    else:
        expect(failure, HangError, r"worker:0 has waited for worker:1 \(on .*\) to")


def one_is_interrupted(cluster):
    """Ctrl-C while the others are waited for ends the run at once, and reaches them."""
    with md.Strategy("cpu*2", POLICY, cluster=cluster, deadline=FAR) as strategy:
        peers = strategy.site.peers

        def merge(strategy):
            peers.meet("begin", str(os.getpid()).encode())
            strategy.reduce("sum", 0)

        def body():
            if cluster.task == 0:
                md.get_replica_context().merge_call(merge)
            elif me() == strategy.first_replica:
                os.kill(int(peers.meet("begin")[0]), signal.SIGINT)
                raise told(strategy)

        failure = caught(strategy.run, body)
    if cluster.task == 0:
        assert type(failure) is KeyboardInterrupt, failure
        assert "was still running" not in words(failure)
    else:
        expect(failure, PeerError, r"worker:0 \(on .*\) has failed .*KeyboardInterrupt")


# --- workers that do different things -----------------------------------------------------------


def other_learning_rates(strategy, task):
    opt, v = md.optim.SGD(0.1 + task), variable(strategy)
    strategy.run(lambda: opt.minimize(lambda: ops.reduce_sum(v), [v]))


def other_variables(strategy, task):
    a, b = variable(strategy, name="a"), variable(strategy, name="b")
    opt, chosen = md.optim.SGD(0.1), [[a, b], [b, a]][task]
    strategy.run(lambda: opt.minimize(lambda: ops.reduce_sum(a + b), chosen))


def other_calls(strategy, task):
    opt, v = md.optim.SGD(0.1), variable(strategy)

    def body():
        if task == 1:
            md.get_replica_context().all_reduce("sum", md.constant(1.0))
        opt.minimize(lambda: ops.reduce_sum(v), [v])

    strategy.run(body)


def counts_in_one_only(strategy, task):
    opt, v = md.optim.SGD(0.1), variable(strategy)
    strategy.run(lambda: opt.minimize(lambda: ops.reduce_sum(v), [v], count=[None, 3][task]))


def no_gradient_anywhere(strategy, task):
    opt, v = md.optim.SGD(0.1), variable(strategy)
    strategy.run(lambda: opt.apply_gradients([(None, v)]))


def other_shapes(strategy, task):
    strategy.run(
        lambda: md.get_replica_context().all_reduce("sum", md.constant([1.0] * (task + 1)))
    )


def other_operations(strategy, task):
    op = ["sum", "mean"][task]
    strategy.run(lambda: md.get_replica_context().all_reduce(op, md.constant(1.0)))


def a_number_and_a_tensor(strategy, task):
    value = [1.0, md.constant(1.0)][task]
    strategy.run(lambda: md.get_replica_context().all_reduce("sum", value))


def other_names(strategy, task):
    variable(strategy, name=f"v{task}")


def other_sizes(strategy, task):
    variable(strategy, value=np.zeros(2 + task))


def other_amounts(strategy, task):
    v = variable(strategy, value=0)
    strategy.run(lambda: md.increment_var(v, 1 + task))


def other_assignments(strategy, task):
    both = [variable(strategy, name=name, aggregation=SUM) for name in "ab"]
    strategy.run(lambda: both[task].assign(md.constant(np.ones(3))))


def other_momenta(strategy, task):
    v = variable(strategy)
    strategy.run(lambda: assign_moving_average(v, np.ones(3), 0.9 - task / 10))


def another_read(strategy, task):
    both = [
        variable(strategy, name=name, synchronization=ON_READ, aggregation=SUM) for name in "ab"
    ]
    with strategy.scope():
        both[task].read()


def other_axes(strategy, task):
    value = strategy.run(lambda: md.constant(np.ones((2, 2))))
    with strategy.scope():
        strategy.gather(value, axis=task)


def other_ranks(strategy, task):
    value = strategy.run(lambda: md.constant(np.ones((2,) * (task + 1))))
    with strategy.scope():
        strategy.gather(value, axis=0)


MISTAKES = {
    other_learning_rates: (
        MergeMismatchError,
        r"apply gradients.*worker:0: lr=0.1; worker:1: lr=1.1",
    ),
    other_variables: (MergeMismatchError, "worker:0: variable 'a', .*; worker:1: variable 'b'"),
    other_calls: (MergeMismatchError, "worker:0: apply gradients; worker:1: reduce"),
    counts_in_one_only: (UsageError, r"some did not: \[None, None, 3, 3\]"),
    no_gradient_anywhere: (UsageError, "no replica has a gradient"),
    other_shapes: (ShapeError, r"replica 0 has float32\[1\] and replica 2 has float32\[2\]"),
    other_operations: (MergeMismatchError, "worker:0: the sum over.*; worker:1: the mean over"),
    a_number_and_a_tensor: (ShapeError, "replica 0 has the number 1.0 and others have tensors"),
    other_names: (MergeMismatchError, "create a variable.*worker:0: 'v0'; worker:1: 'v1'"),
    other_sizes: (MergeMismatchError, r"worker:0: of float64\[2\]; worker:1: of float64\[3\]"),
    other_amounts: (MergeMismatchError, "worker:0: 'v' by 1; worker:1: 'v' by 2"),
    other_assignments: (MergeMismatchError, "worker:0: assigned to 'a'; worker:1: assigned to 'b'"),
    other_momenta: (MergeMismatchError, r"worker:0: .*momentum of 0\.9; worker:1: .*0\.8"),
    another_read: (MergeMismatchError, "worker:0: read 'a' .*; worker:1: read 'b'"),
    other_axes: (MergeMismatchError, "worker:0: gather along axis 0; worker:1: .* axis 1"),
    other_ranks: (ShapeError, r"replica 0 has float64\[2\] and replica 2 has float64\[2, 2\]"),
}


def variable(strategy, value=None, name="v", **options):
    with strategy.scope():
        return md.Variable(np.zeros(3) if value is None else value, name=name, **options)


def a_mistake(mistake, cluster):
    kind, pattern = MISTAKES[mistake]
    with md.Strategy("cpu*2", POLICY, cluster=cluster, deadline=FAR) as strategy:
        expect(caught(mistake, strategy, cluster.task), kind, pattern)


CASES = {}
for phase in ("forward", "backward", "sum", "update", "merge", "after the update", "between"):
    for workers, devices in ((2, 1), (3, 2)):
        CASES[f"fails in {phase} {workers}x{devices}"] = (
            workers,
            0,
            partial(a_worker_fails, phase, devices, {}),
        )
for phase in ("forward", "backward", "sum"):
    for name, more in {"": {}, " relaxed": {"variable_consistency": "relaxed"}}.items():
        CASES[f"fails in {phase}, in buckets{name}"] = (
            2,
            0,
            partial(a_worker_fails, phase, 2, {**OVERLAP, **more}),
        )
CASES |= {
    "leaves early": (2, 0, partial(one_leaves_early, {})),
    "leaves early, in buckets": (2, 0, partial(one_leaves_early, OVERLAP)),
    "hangs 3x1": (3, 0, partial(one_hangs, 1)),
    "hangs 2x2": (2, 0, partial(one_hangs, 2)),
    "hangs in buckets": (2, 0, one_hangs_in_buckets),
    "is interrupted": (2, 0, one_is_interrupted),
}
CASES |= {mistake.__name__: (2, 0, partial(a_mistake, mistake)) for mistake in MISTAKES}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, WORKERS, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_it_reaches_all_workers(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
