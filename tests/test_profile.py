"""Profile: what is counted in closed form, times by a clock that the test turns."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from benching import PLAIN_SGD, QUICK, run

import minidist as md
from minidist import observe
from minidist.device import cpu_linear
from minidist.device.cpu_ops import CpuOps
from minidist.errors import UsageError
from minidist.instruments import profile
from minidist.instruments.primitives import Kept, told
from minidist.kernels import peak


@pytest.fixture
def clock(monkeypatch):
    """A clock in milliseconds that stands still but for what the test adds."""
    now = SimpleNamespace(ms=0)
    monkeypatch.setattr(profile.time, "perf_counter_ns", lambda: round(now.ms * 1e6))
    return now


@pytest.fixture
def strategy():
    with md.Strategy("cpu*2") as made:
        yield made


def matrix(*shape):
    return md.constant(np.ones(shape, "f4"))


def test_calls_and_operations_are_counted_in_each_replica(strategy):
    def products(times):
        a, b = matrix(64, 256), matrix(256, 128)
        for _ in range(times):
            md.ops.matmul(a, b)

    found = md.Profile(strategy)
    for times in (1, 3):
        with found:
            strategy.run(products, times)
    strategy.run(products, 5)  # nobody listens
    replicas = found.replicas()
    assert [(each.replica, each.device, each.steps) for each in replicas] == [
        (0, "cpu:0", 2),
        (1, "cpu:1", 2),
    ]
    for each in replicas:
        (spent,) = (spent for spent in each.spent if spent.operation == "matmul")
        assert spent.calls == 2
        assert spent.gflop == pytest.approx(2 * 2 * 64 * 256 * 128 / 1e9)
        assert spent.implementation == cpu_linear.used()[spent.work]
        assert each.waiting >= 0
        assert each.between >= 0
        assert each.step == pytest.approx(each.computing + each.waiting + each.between)
        assert 0 < each.share == pytest.approx(spent.gflop / (each.peak * each.step / 1e3))


def test_a_primitive_within_another_is_part_of_it(strategy):
    with md.Profile(strategy) as found:
        strategy.run(lambda: md.ops.reduce_sum(matrix(5, 4), axis=0))  # by way of bias_backward
    for each in found.replicas():
        assert {spent.operation: spent.calls for spent in each.spent} == {"reduce_sum": 1}
        assert {spent.implementation for spent in each.spent} == {profile.PLAIN}


def test_a_step_is_primitives_waiting_and_what_lies_between(clock):
    with md.Strategy("cpu*1") as strategy, md.Profile(strategy) as found:

        def spend(kind, ms):
            with observe.span(kind, "x"):
                clock.ms += ms

        def step():
            clock.ms += 1
            spend("verb", 2)
            with observe.span("peers", "x"):  # a wait within a wait
                clock.ms += 4
                spend("await", 8)
            spend("merge", 16)
            spend("verb", 32)

        strategy.run(step)
        strategy.run(step)
        strategy.run(spend, "copy", 3)
        spend("verb", 64)  # not a replica's
    (each,) = found.replicas()
    assert (each.steps, each.step, each.median) == (3, 43, 63)
    assert (each.waiting, each.between) == pytest.approx((24 / 3, 37 / 3))
    (spent,) = each.spent
    assert (spent.operation, spent.work, spent.implementation) == ("x", "", profile.PLAIN)
    assert (spent.calls, spent.ms) == pytest.approx((4 / 3, 68 / 3))


def test_a_thread_of_no_replica_is_not_counted(strategy):
    with md.Profile(strategy) as found:

        def elsewhere():
            thread = threading.Thread(target=lambda: matrix(2) + 1)
            thread.start()
            thread.join()

        strategy.run(elsewhere)
    assert [each.spent for each in found.replicas()] == [[], []]


def test_the_verbs_are_themselves_again():
    before = dict(vars(CpuOps))
    with told(), told():
        assert vars(CpuOps)["matmul"] is not before["matmul"]
    assert dict(vars(CpuOps)) == before


def test_primitives_alone_leave_no_trace(strategy):
    """They are done again with all that they were given, but write to copies."""
    with strategy.scope():
        w = md.Variable(np.full(100, 2, "f4"), name="w")
    optimizer = md.optim.Momentum(0.1)
    kept = Kept()

    def step():
        optimizer.minimize(lambda: md.ops.reduce_sum(w * w), [w])

    with md.Profile(strategy) as found, observe.attached(kept):
        strategy.run(step)
    steps, after = strategy.step, w.numpy()
    found.time_alone(kept)
    assert strategy.step == steps
    assert w.numpy().tobytes() == after.tobytes()
    assert all(each.alone > 0 for each in found.replicas())
    assert not kept  # and nothing of the step stays in memory
    assert "times what its operations take alone" in str(found)


def test_only_cpus_have_a_profile():
    gpu = SimpleNamespace(kind="cuda", short="cuda:0")
    with pytest.raises(UsageError, match=r"cuda:0 is given work .*; profile a strategy of CPU"):
        md.Profile(SimpleNamespace(devices=[gpu]))


def test_the_peak_counts_what_it_does():
    of_one, of_seven = peak.multiply_add(1), peak.multiply_add(7)
    assert of_seven == 7 * of_one
    assert of_one in {2 * 12 * lanes for lanes in (4, 8, 16)}
    assert peak.multiply_add(0) == 0


def test_lines_say_it_of_all_replicas():
    def replica(number, ms):
        spent = [
            profile.Spent("conv2d", "conv2d of 3x3", "gemm", 2, ms, 0.5),
            profile.Spent("conv2d", "conv2d of 1x1", "gemm", 1, ms, 0.5),
            profile.Spent("relu", "", profile.PLAIN, 1, 1.0),
        ]
        made = profile.OfReplica(number, f"cpu:{number}", 3, 100.0, 96.0, 7.0, spent, 50.0, 0.08)
        return profile.asdict(made)

    said = profile.lines([replica(0, 20.0), replica(1, 30.0)])
    cells = {line.strip().partition("  ")[0]: line.split() for line in said}
    assert cells["conv2d"] == ["conv2d", "gemm", "3", "40.000", "60.000", "20.0", "40", "%"]
    assert cells["relu"] == ["relu", *profile.PLAIN.split(), "1", "1.000", "1.000"]
    assert cells["between operations"][2:] == ["52.000", "32.000"]
    assert cells["waiting"][1:] == ["7.000", "7.000"]
    assert cells["all"][1:] == ["100.000", "100.000"]
    assert "  conv2d of 3x3" in said
    assert said[-2] == "Share of the peak, which is 50, 50 GFLOP/s: 20 %, 20 %"
    assert said[-1].startswith("A step takes 1.20 times what its operations take alone: 96.00 ms")


def test_the_bench_profiles_without_a_trace():
    flags = "--model=mlp", *QUICK, *PLAIN_SGD
    plain, profiled = run(*flags), run(*flags, "--profile")
    assert profiled.losses == plain.losses
    assert profiled.checksums == plain.checksums
    assert plain.results["profile"] is None
    found = profiled.results["profile"]
    assert [each["replica"] for each in found] == [0, 1]
    for each in found:
        assert each["steps"] == 4
        assert each["alone"] > 0
        assert {"dense", "matmul", "sgd"} <= {spent["operation"] for spent in each["spent"]}
    assert "Operations, in ms of a step" in profiled.text
    assert "Operations, in ms of a step" not in plain.text


def test_kernels_are_what_the_flag_says():
    profiled = run("--model=mlp", "--kernels=gemm", "--profile", *QUICK, *PLAIN_SGD)
    try:
        assert cpu_linear.kernels() == "gemm"
        by = {
            spent["implementation"]
            for each in profiled.results["profile"]
            for spent in each["spent"]
            if spent["work"]
        }
        assert by == {"gemm"}
    finally:
        cpu_linear.set_kernels("auto")
