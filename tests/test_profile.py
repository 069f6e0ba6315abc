"""Profile: what is counted in closed form, times by a clock that the test turns."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from benching import PLAIN_SGD, QUICK, run

import minidist as md
from minidist import observe, threads
from minidist.bench import merging
from minidist.device import cpu_linear, cpu_onednn
from minidist.device.cpu_ops import CpuOps
from minidist.errors import UsageError
from minidist.instruments import profile
from minidist.instruments.primitives import Call, Kept, told
from minidist.kernels import peak


@pytest.fixture
def clock(monkeypatch):
    """A clock in milliseconds that stands still but for what the test adds."""
    now = SimpleNamespace(ms=0)
    monkeypatch.setattr(profile.time, "perf_counter_ns", lambda: round(now.ms * 1e6))
    return now


@pytest.fixture
def kernels():
    """What sets the kernels until the test ends."""
    before = cpu_linear.kernels()
    yield cpu_linear.set_kernels
    cpu_linear.set_kernels(before)


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
        assert (spent.work, spent.implementation) in cpu_linear.used()
        assert min(each.waiting, each.between, each.outside) >= 0
        parts = each.computing + each.waiting + each.between + each.outside
        assert each.step == pytest.approx(parts)
        assert 0 < each.share == pytest.approx(spent.gflop / (each.peak * each.step / 1e3))


def test_a_primitive_within_another_is_part_of_it(strategy):
    with md.Profile(strategy) as found:
        strategy.run(lambda: md.ops.reduce_sum(matrix(5, 4), axis=0))  # by way of bias_backward
    for each in found.replicas():
        assert {spent.operation: spent.calls for spent in each.spent} == {"reduce_sum": 1}
        assert {spent.implementation for spent in each.spent} == {profile.PLAIN}


def test_what_does_a_work_is_kept_with_each_call(strategy, kernels):
    """A few examples are small work and go the plain way, though many go by another."""
    if cpu_onednn.find() is None:
        pytest.skip(cpu_onednn.why_not())
    kernels("onednn")

    def products():
        for examples in (64, 2, 64):
            md.ops.matmul(matrix(examples, 256), matrix(256, 128))

    with md.Profile(strategy) as found:
        strategy.run(products)
    for each in found.replicas():
        spents = [spent for spent in each.spent if spent.operation == "matmul"]
        assert len({spent.work for spent in spents}) == 1
        assert {spent.implementation: spent.calls for spent in spents} == {"onednn": 2, "gemm": 1}
        gflop = {spent.implementation: spent.gflop for spent in spents}
        assert gflop["onednn"] == pytest.approx(64 * gflop["gemm"])


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

        clock.ms += 1000  # before the first step
        strategy.run(step)
        clock.ms += 128  # the next batch, perhaps
        strategy.run(step)
        strategy.run(spend, "copy", 3)
        spend("verb", 64)  # not a replica's
        with found.paused():
            clock.ms += 1000
            strategy.run(step)
        clock.ms += 1000  # after the last step
    (each,) = found.replicas()
    assert (each.steps, each.step, each.median) == (3, (191 + 63 + 67) / 3, 67)
    assert (each.waiting, each.between) == pytest.approx((24 / 3, 37 / 3))
    assert each.outside == pytest.approx((128 + 64) / 3)
    (spent,) = each.spent
    assert (spent.operation, spent.work, spent.implementation) == ("x", "", profile.PLAIN)
    assert (spent.calls, spent.ms) == pytest.approx((4 / 3, 68 / 3))


def test_choosing_is_in_no_step(clock):
    with md.Strategy("cpu*1") as strategy, md.Profile(strategy) as found:

        def step(chooses):
            with observe.span("verb", "x"):
                clock.ms += 2
                if chooses:
                    with observe.span("choose", "a"):
                        clock.ms += 100
                        with observe.span("choose", "b"):  # one within another
                            clock.ms += 50
            clock.ms += 1

        for chooses in (True, False, False):
            strategy.run(step, chooses)
    (each,) = found.replicas()
    assert (each.choosing, each.step, each.median) == (150, 3, 3)
    assert (each.computing, each.between, each.outside) == pytest.approx((2, 1, 0))
    assert "To choose what computes has taken 150.0 ms in all, which is in no step" in str(found)


def test_what_is_chosen_is_told(strategy, kernels):
    """A new kind of work makes a step long, and the profile says so."""
    kernels("auto")
    with md.Profile(strategy) as found:
        for _ in range(2):
            strategy.run(lambda: md.ops.matmul(matrix(64, 257), matrix(257, 127)))
    assert any(each.choosing > 0 for each in found.replicas())  # who comes late finds it made
    with md.Profile(strategy) as found:
        strategy.run(lambda: md.ops.matmul(matrix(64, 257), matrix(257, 127)))
    assert all(each.choosing == 0 for each in found.replicas())
    assert "To choose" not in str(found)


def test_runs_within_a_step_and_of_other_strategies_are_none(strategy):
    def merged(outer):
        outer.run(lambda: matrix(2) + 1)

    def step():
        md.get_replica_context().merge_call(merged)

    with md.Profile(strategy) as found, md.Strategy("cpu*2") as other:
        strategy.run(step)
        other.run(lambda: matrix(2) + 1)
    assert [each.steps for each in found.replicas()] == [1, 1]
    assert [each.spent for each in found.replicas()] == [[], []]
    assert min(each.outside for each in found.replicas()) >= 0


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


@pytest.mark.parametrize(("cores", "patience", "meet"), [(1, 0.1, False), (2, 10, True)])
def test_replicas_take_turns_where_they_outnumber_the_cores(
    strategy, monkeypatch, cores, patience, meet
):
    """Otherwise all are at it at a time, as in a step."""
    kept, met = Kept(), []
    both = threading.Barrier(2)

    def seconds(call):
        try:
            both.wait(patience)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)
        return 0.001

    a = matrix(2, 2)
    with told(), observe.attached(kept):
        strategy.run(lambda: md.ops.matmul(a, a))
    monkeypatch.setattr(Call, "seconds", seconds)
    monkeypatch.setattr(threads, "cores", lambda: cores)
    assert set(kept.alone(strategy)) == {0, 1}
    assert set(met) == {meet}


def test_the_peak_is_that_of_all_threads_of_a_replica(strategy, monkeypatch):
    """They are at it at a time, which is less than the first one's by their number."""

    def of_thread(together):
        assert together.parties == 3
        together.wait(10)  # nobody gets by who is alone
        return 7.0

    monkeypatch.setattr(threads, "per_replica", lambda: 3)
    monkeypatch.setattr(profile, "peak_of_thread", of_thread)
    assert profile.measured_peaks(strategy) == [21.0, 21.0]


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
        made = profile.OfReplica(
            replica=number,
            device=f"cpu:{number}",
            steps=3,
            step=100.0,
            median=96.0,
            outside=12.0,
            waiting=7.0,
            spent=spent,
            peak=50.0,
            alone=80.0,
        )
        assert profile.OfReplica.from_json(json.loads(json.dumps(made.json()))) == made
        return made

    said = profile.lines([replica(0, 20.0), replica(1, 30.0)])
    cells = {line.strip().partition("  ")[0]: line.split() for line in said}
    assert cells["conv2d"] == ["conv2d", "gemm", "3", "40.000", "60.000", "20.0", "40", "%"]
    assert cells["relu"] == ["relu", *profile.PLAIN.split(), "1", "1.000", "1.000"]
    assert cells["between operations"][2:] == ["40.000", "20.000"]
    assert cells["outside the replica"][3:] == ["12.000", "12.000"]
    assert cells["waiting"][1:] == ["7.000", "7.000"]
    assert cells["the step"][2:] == ["100.000", "100.000"]
    assert "  conv2d of 3x3" in said
    assert said[-2] == "Share of the peak, which is 50, 50 GFLOP/s: 20 %, 20 %"
    assert said[-1] == (
        "A step takes 1.20 times what its operations take alone:"
        " 96.00 ms (the median) and 80.00 ms, in replica 0"
    )


def test_the_longest_names_stand_apart_from_their_neighbours():
    names = "depthwise_conv2d_backward_filter", "brgconv:avx512_core"
    spent = [profile.Spent(names[0], "", names[1], 21, 1.0)]
    said = profile.lines([profile.OfReplica(0, "cpu:0", spent=spent, peak=1.0, step=1.0)])
    assert said[1].split() == [*names, "21", "1.000"]
    assert {len(line) for line in said[1:6]} == {said[0].index("replica 0") + len("replica 0")}


def test_replicas_are_numbered_through_the_workers():
    spent = [profile.Spent("relu", "", profile.PLAIN, 1, 1.0)]
    own = [profile.OfReplica(number, f"cpu:{number}", spent=spent) for number in range(2)]
    brought = [each.json() for each in own]
    found = merging.profile([brought, brought])
    assert [(each.replica, each.device) for each in found] == [
        (0, "cpu:0"),
        (1, "cpu:1"),
        (2, "cpu:0"),
        (3, "cpu:1"),
    ]
    assert all(each.spent == spent for each in found)
    assert merging.profile([None, None]) is None


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
        assert each["outside"] > 0
        assert each["alone"] > 0
        assert {"dense", "matmul", "sgd"} <= {spent["operation"] for spent in each["spent"]}
    assert "Operations, in ms of a step" in profiled.text
    assert "Operations, in ms of a step" not in plain.text


def test_kernels_are_what_the_flag_says(kernels):
    profiled = run("--model=mlp", "--kernels=gemm", "--profile", *QUICK, *PLAIN_SGD)
    assert cpu_linear.kernels() == "gemm"
    by = {
        spent["implementation"]
        for each in profiled.results["profile"]
        for spent in each["spent"]
        if spent["work"]
    }
    assert by == {"gemm"}
