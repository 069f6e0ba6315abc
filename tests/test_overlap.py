"""Sums taken bucket by bucket during the backward pass, and the relaxed ones taken after it."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import optimizer, same_bits

import minidist as md
from minidist import ops
from minidist.device import host
from minidist.errors import MinidistError
from minidist.variable_mgr.agreement import find
from minidist.variable_mgr.errand import Errand
from minidist.variable_mgr.overlap import FIRST_BUCKET, Filling, Plan

POLICIES = {
    "replicated": {},
    "replicated+relaxed": {"variable_consistency": "relaxed"},
    "parameter_server": {},
    "parameter_server_device": {"local_parameter_device": "device"},
}


def make(policy, n, **options):
    name = policy.split("+")[0].removesuffix("_device")
    return md.Strategy(f"cpu*{n}", name, **POLICIES[policy], **options)


def train(policy, n, steps, *, used=None, counts=None, rule="adam", **options):
    """Train Σ x·w over some variables; return the weights that each replica reads at the end.

    `used[step][replica]` has the numbers of the variables in the loss, all unless given.
    """
    rng = np.random.default_rng(3)
    shapes = [(5,), (), (3, 4), (70_000,), (2,), (90_001,)]
    opt = optimizer(rule, 0.01)
    with make(policy, n, **options) as strategy:
        with strategy.scope():
            variables = [
                md.Variable(rng.normal(size=s), name=f"v{i}") for i, s in enumerate(shapes)
            ]
        for step in range(steps):
            data = rng.normal(size=(n, len(shapes)))
            have = counts and counts[step]

            def body(step=step, data=data, have=have):
                me = md.get_replica_context().replica_id
                mine = range(len(shapes)) if used is None else used[step][me]

                def loss():
                    total = md.constant(0.0, "float64")
                    for i in mine:
                        total = total + ops.reduce_sum(ops.square(variables[i]) * data[me, i])
                    return total

                opt.minimize(loss, variables, count=have and have[me])

            strategy.run(body)
        weights = [None] * n

        def read():
            weights[md.get_replica_context().replica_id] = [v.numpy() for v in variables]

        strategy.run(read)
        return weights


def assert_same(a, b):
    for ours, theirs in zip(a, b, strict=True):
        assert all(same_bits(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cap", [1e-9, 0.6, 25.0])
def test_buckets_change_no_bit(policy, n, cap):
    plain = train(policy, n, 4, overlap=False)
    assert_same(train(policy, n, 4, overlap=True, bucket_cap_mb=cap), plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_weigh_in_buckets_as_without(policy):
    counts = [[3, 1, 2], [0, 4, 0], [0, 0, 0], [1, 1, 1], [2, 0, 5]]
    plain = train(policy, 3, 5, counts=counts, overlap=False)
    assert_same(train(policy, 3, 5, counts=counts, overlap=True, bucket_cap_mb=0.1), plain)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_zeros_complete_the_buckets_of_unused_variables(data):
    n, steps = data.draw(st.integers(2, 3)), 3
    some = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
    used = [[data.draw(some) for _ in range(n)] for _ in range(steps)]
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    plain = train(policy, n, steps, used=used, overlap=False)
    assert_same(train(policy, n, steps, used=used, overlap=True, bucket_cap_mb=0.3), plain)


def test_a_bucket_is_summed_before_the_backward_pass_has_ended():
    """The last gradient is held back until another thread has seen the first bucket's sum."""
    n, summed = 2, threading.Event()
    with make("replicated", n, overlap=True, bucket_cap_mb=1e-9) as strategy:
        with strategy.scope():
            first, last = md.Variable(np.ones(3), name="a"), md.Variable(np.ones(3), name="b")
        opt = md.optim.SGD(1.0)
        real = strategy.variable_mgr.combine.sum_into

        def sum_into(*args):
            real(*args)
            summed.set()

        strategy.variable_mgr.combine.sum_into = sum_into
        seen = []

        def held(x, step):
            def backward(dy, needs):
                if step:
                    seen.append(summed.wait(30))
                return [dy]

            return md.tape.record(x.array, (x,), backward)

        def body(step):
            def loss():
                return ops.reduce_sum(held(first.read(), step) * 2.0 + last.read())

            opt.minimize(loss, [first, last])

        strategy.run(body, 0)
        summed.clear()
        strategy.run(body, 1)
        assert seen == [True] * n
        assert same_bits(first.numpy(), np.full(3, -3.0))
        assert same_bits(last.numpy(), np.full(3, -1.0))


def test_buckets_follow_the_backward_pass_and_the_first_is_small():
    shapes = [(FIRST_BUCKET // 8,), (FIRST_BUCKET // 8,), (7,), (3 * FIRST_BUCKET // 8,), (1,)]
    with make("replicated", 2, overlap=True) as strategy:
        with strategy.scope():
            variables = [md.Variable(np.zeros(s)) for s in shapes]
        contribution = strategy.variable_mgr.contribution(md.optim.SGD(1.0), variables, None)
    for i in [4, 3, 2, 1, 0]:
        contribution.give(variables[i], np.zeros(shapes[i]))
    agreed, group = find([contribution]), contribution.group
    assert Plan.of(group, agreed, 2 * FIRST_BUCKET).buckets == ((4, 3), (2, 1, 0))
    assert Plan.of(group, agreed, 1).buckets == ((4,), (3,), (2,), (1,), (0,))
    assert Plan.of(group, agreed, 2**40).buckets == ((4, 3), (2, 1, 0))


def test_sparse_gradients_are_in_no_bucket():
    def weights(**options):
        rng = np.random.default_rng(1)
        with make("replicated", 2, **options) as strategy:
            with strategy.scope():
                table = md.Variable(rng.normal(size=(9, 4)), name="table")
                kernel = md.Variable(rng.normal(size=4), name="kernel")
            opt = md.optim.Momentum(0.1)
            for step in range(4):

                def body(step=step):
                    me = md.get_replica_context().replica_id

                    def loss():
                        if step == 2 and me == 1:  # dense for once
                            rows = table.read()
                        else:
                            rows = ops.embedding(table, np.array([step, me, step + 3]))
                        return ops.reduce_sum(ops.square(rows) * kernel)

                    opt.minimize(loss, [table, kernel])

                strategy.run(body)
            return [[table.numpy(), kernel.numpy()]]

    assert_same(weights(overlap=True, bucket_cap_mb=1e-9), weights(overlap=False))


def test_a_replica_that_brings_its_gradients_otherwise_is_heard_too():
    def weights(**options):
        with make("replicated", 2, **options) as strategy:
            with strategy.scope():
                v = md.Variable(np.arange(4.0), name="v")
            opt = md.optim.SGD(0.1)

            def body(step):
                me = md.get_replica_context().replica_id

                def loss():
                    return ops.reduce_sum(ops.square(v) * (me + 1.0))

                if step == 1 and me == 1:
                    with md.GradientTape() as tape:
                        value = loss()
                    opt.apply_gradients([(tape.gradient(value, v), v)])
                else:
                    opt.minimize(loss, [v])

            for step in range(3):
                strategy.run(body, step)
            return [[v.numpy()]]

    assert_same(weights(overlap=True), weights(overlap=False))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_in_the_backward_pass_leaves_no_half_filled_bucket_behind(policy):
    with make(policy, 2, overlap=True, bucket_cap_mb=1e-9) as strategy:
        with strategy.scope():
            a, b = md.Variable(np.ones(3), name="a"), md.Variable(np.ones(3), name="b")
        opt = md.optim.SGD(0.5)

        def body(fail):
            me = md.get_replica_context().replica_id

            def breaks(x):
                def backward(dy, needs):
                    if fail and me == 1:
                        raise ZeroDivisionError("planted")
                    return [dy]

                return md.tape.record(x.array, (x,), backward)

            opt.minimize(lambda: ops.reduce_sum(breaks(a.read()) + b.read()), [a, b])

        strategy.run(body, False)
        with pytest.raises(ZeroDivisionError, match="planted"):
            strategy.run(body, True)
        strategy.run(body, False)
        steps = 1 if policy == "replicated+relaxed" else 2
        assert same_bits(a.numpy(), np.full(3, 1 - 0.5 * steps))
        assert same_bits(b.numpy(), np.full(3, 1 - 0.5 * steps))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_sum_reaches_the_caller(policy, overlap):
    how = {"overlap": overlap, "all_reduce_spec": "copy"}
    with make(policy, 2, bucket_cap_mb=1e-9, **how) as strategy:
        with strategy.scope():
            v = md.Variable(np.ones(3), name="v")
        opt = md.optim.SGD(0.5)

        def body():
            opt.minimize(lambda: ops.reduce_sum(ops.square(v)), [v])

        strategy.run(body)

        def broken(*args):
            raise MemoryError("planted")

        strategy.variable_mgr.combine.sums.sum_into = broken
        failures = []
        while not failures:  # of relaxed sums the next step may be the first to hear
            try:
                strategy.run(body)
            except MemoryError as failure:
                failures.append(str(failure))
        assert failures == ["planted"]
        del strategy.variable_mgr.combine.sums.sum_into
        strategy.run(body)


def test_whoever_waits_for_a_failed_errand_hears_of_it_every_time():
    errand = Errand(host().stream("communication"))
    errand.add(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            errand.wait()


def test_counts_in_some_replicas_only_are_refused_in_buckets_too():
    with make("replicated", 2, overlap=True) as strategy:
        with strategy.scope():
            v = md.Variable(np.ones(3), name="v")
        opt = md.optim.SGD(0.5)

        def body(odd):
            me = md.get_replica_context().replica_id
            opt.minimize(lambda: ops.reduce_sum(v * 1.0), [v], count=None if odd and me else 1)

        strategy.run(body, False)
        with pytest.raises(MinidistError, match="some replicas gave a count and some did not"):
            strategy.run(body, True)
        strategy.run(body, False)


def test_options_are_checked():
    with pytest.raises(ValueError, match="bucket_cap_mb=0 must be a number above 0"):
        md.Strategy("cpu*2", bucket_cap_mb=0)
    with pytest.raises(ValueError, match="variable_consistency='relaxed' is for replicated"):
        md.Strategy("cpu*2", "parameter_server", variable_consistency="relaxed")
    with pytest.raises(ValueError, match="may be strong, relaxed"):
        md.Strategy("cpu*2", variable_consistency="weak")


def test_gradients_are_freed_without_the_garbage_collector(monkeypatch):
    """A ring of a filling and its contributions would keep them until it comes by."""
    gradients = []
    given_all = Filling.given_all

    def spy(filling, contribution):
        gradients.extend(weakref.ref(each) for each in contribution.gradients)
        given_all(filling, contribution)

    monkeypatch.setattr(Filling, "given_all", spy)
    with md.Strategy("cpu*2", overlap=True) as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(70_000, "f4"), name="w")
        optimizer = md.optim.SGD(0.1)
        gc.disable()
        try:
            for _ in range(3):
                strategy.run(lambda: optimizer.minimize(lambda: ops.reduce_sum(ops.square(w)), [w]))
            assert len(gradients) == 4  # of two replicas; the first step has no buckets yet
            assert [gradient() is None for gradient in gradients] == [True] * 4
        finally:
            gc.enable()
