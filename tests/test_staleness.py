"""Staleness: ages of gradients in closed form, under every policy."""

from __future__ import annotations

import numpy as np
import pytest
from policies import EVERY, LATE, RELAXING, STAGING

import minidist as md

ONE = np.ones(3, "f4")
EVERY_POLICY = pytest.mark.parametrize("policy", EVERY)


class Job:
    """Two variables under a policy; `step` trains one of them, or both."""

    def __init__(self, policy, n=2, **options):
        name, policy_options = EVERY[policy]
        self.strategy = md.Strategy(f"cpu*{n}", name, **policy_options, **options)
        with self.strategy.scope():
            self.a, self.b = (md.Variable(ONE, name=name) for name in "ab")
        self.optimizer = md.optim.SGD(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def step(self, used=None, count=None):
        used = used or [self.a, self.b]

        def loss():
            return sum((md.ops.reduce_sum(v * v) for v in used[1:]), md.ops.reduce_sum(used[0]))

        self.optimizer.minimize(loss, [self.a, self.b], count=count and count())

    def ages(self, fn, *args):
        """Return the histogram of one run of a function."""
        with md.Staleness() as ages:
            self.strategy.run(fn, *args)
        return ages.histogram


def late(policy):
    return 1 if policy in LATE else 0


@EVERY_POLICY
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_ages_of_a_training(policy, n, overlap):
    """0 where the policy is strong, and 1 where it is late, but for its first step."""
    pairs = 2 * n
    with Job(policy, n, overlap=overlap) as job:
        with md.Staleness() as ages:
            job.strategy.run(job.step)
            first = ages.histogram
            for _ in range(4):
                job.strategy.run(job.step)
        assert first == ({} if policy in RELAXING else {0: pairs})
        if policy in RELAXING:  # the first step applies zeros, which come from nothing
            assert ages.histogram == {1: 4 * pairs}
        elif policy in STAGING:
            assert ages.histogram == {0: pairs, 1: 4 * pairs}
        else:
            assert ages.histogram == {0: 5 * pairs}


@EVERY_POLICY
def test_an_unused_variable_has_no_age(policy):
    with Job(policy) as job:
        for _ in range(3):
            job.strategy.run(job.step, [job.a])
        with md.Staleness() as ages:
            for _ in range(3):
                job.strategy.run(job.step, [job.a])
        steps = 2 if policy in RELAXING else 3  # the first one's gradients are from before
        assert ages.histogram == {late(policy): steps * 2}


@EVERY_POLICY
def test_only_who_has_a_gradient_and_an_example_counts(policy):
    """Of three replicas the last has none, and the second does not use `b`."""
    with Job(policy, 3) as job, md.Staleness() as ages:

        def step():
            replica = md.get_replica_context().replica_id
            job.step([job.a] if replica else None, lambda: 2 - replica)

        for _ in range(3):
            job.strategy.run(step)
    counts = {"independent": 9, **dict.fromkeys(RELAXING, 6)}
    if policy == "independent":  # replica 2 has nothing to apply
        assert ages.histogram == {0: 9}
    else:
        assert sum(ages.histogram.values()) == counts.get(policy, 9)


@EVERY_POLICY
def test_an_update_without_a_read_is_older_by_one_each_time(policy):
    """A gradient is taken to come from what was read last, however long ago."""
    with Job(policy) as job:
        for _ in range(3):
            job.strategy.run(job.step)

        def apply():
            job.optimizer.apply_gradients([(md.constant(ONE), job.a), (md.constant(ONE), job.b)])

        assert job.ages(job.step).keys() <= {late(policy)}
        with md.Staleness() as ages:
            job.strategy.run(job.step)
            for _ in range(3):
                job.strategy.run(apply)
        if policy in RELAXING:  # the first of these updates is that of the step before
            assert ages.histogram == {1: 8, 2: 4, 3: 4}
        else:
            assert ages.histogram == {late(policy) + k: 4 for k in range(4)}


@EVERY_POLICY
def test_a_gradient_of_what_was_never_read_has_no_age(policy):
    with Job(policy) as job, md.Staleness() as ages:
        for _ in range(3):
            job.strategy.run(lambda: job.optimizer.apply_gradients([(md.constant(ONE), job.a)]))
    assert ages.histogram == {} and str(ages) == "nothing was applied"


@EVERY_POLICY
def test_runs_without_an_update_change_no_age(policy):
    with Job(policy) as job:
        for _ in range(3):
            job.strategy.run(job.step)
        with md.Staleness() as ages:
            for _ in range(3):
                job.strategy.run(job.a.read)
                job.strategy.run(job.step)
        assert ages.histogram.keys() == {late(policy)}


@pytest.mark.parametrize("policy", STAGING)
def test_what_was_assigned_is_read_as_it_is(policy):
    with Job(policy) as job:
        for _ in range(3):
            job.strategy.run(job.step)
        with job.strategy.scope():
            job.a.assign(ONE)
        assert job.ages(job.step) == {0: 2, 1: 2}
        assert job.ages(job.step) == {1: 4}


@EVERY_POLICY
def test_batches_of_one_update_read_the_same(policy):
    with Job(policy) as job:
        job.optimizer = md.optim.SGD(0.01, gradient_accumulation_steps=3)
        for _ in range(6):
            job.strategy.run(job.step)
        with md.Staleness() as ages:
            for _ in range(9):
                job.strategy.run(job.step)
        assert ages.histogram == {late(policy): (2 if policy in RELAXING else 3) * 4}


@EVERY_POLICY
def test_gradients_that_are_applied_for_all_replicas_at_once(policy):
    with Job(policy) as job:

        def gradients():
            with md.GradientTape() as tape:
                loss = md.ops.reduce_sum(job.a * job.b)
            return tape.gradient(loss, [job.a, job.b])

        with md.Staleness() as ages:
            for _ in range(4):
                found = job.strategy.run(gradients)
                with job.strategy.scope():
                    pairs = list(zip(found, [job.a, job.b], strict=True))
                    job.optimizer.distributed_apply(pairs)
        first = {} if policy in RELAXING else {0: 4} if policy in STAGING else {0: 16}
        assert ages.histogram == first | ({1: 12} if policy in LATE else {})


def test_the_histogram_as_text():
    with Job("parameter_server+staged_vars") as job, md.Staleness() as ages:
        for _ in range(4):
            job.strategy.run(job.step)
    first, second = str(ages).splitlines()
    assert first.split() == ["0", "█" * 13, "4"]
    assert second.split() == ["1", "█" * 40, "12"]
