"""Phases: closed forms on spans made by hand, and what holds for those of real trainings."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from benching import call, refused, run
from hypothesis import given
from hypothesis import strategies as st
from recordings import MS, recording, replica, slow_step, span, train

import minidist as md
from minidist import context, observe
from minidist.bench.inject import Fault, Faults
from minidist.errors import InjectedError
from minidist.trace import Timeline, phases
from minidist.trace.phases import PHASES, common, length, segments, union
from minidist.trace.words import verdict

BENCH = ("--model=trivial", "--num_batches=6", "--num_warmup_batches=1")


def of(name, found):
    return found.replicas[name]


def figures(**given):
    return {name: pytest.approx(given.get(name, 0)) for name in PHASES}


# --- by hand


def test_a_step_by_hand():
    found = phases(recording(*slow_step()))
    assert (found.steps, found.step) == (1, 100)
    early, late = found.replicas
    # 50 to 60 until replica 1 came, 70 to 72 to wake up, and 90 to 95 until it had returned.
    assert early.phases == figures(
        input=10, forward=18, backward=20, waiting=10 + 2 + 5, reduce=6, update=16, other=13
    )
    assert late.phases == figures(input=10, forward=26, backward=20, reduce=6, update=22, other=16)
    assert early.waited_for == {1: pytest.approx(17)} and late.waited_for == {}
    assert (early.own, late.own) == (pytest.approx(78 - 22), pytest.approx(81 - 10))
    assert (early.behind, late.behind) == (0, pytest.approx(15))
    assert found.phases == figures(
        input=10, forward=22, backward=20, waiting=8.5, reduce=6, update=19, other=14.5
    )


def test_figures_are_means_over_the_steps():
    one, ticks = slow_step()
    two, more = slow_step(at=300, step=2)
    for each in two:  # the second one takes twice as long
        each.start, each.end = (300 * MS + 2 * (at - 300 * MS) for at in (each.start, each.end))
    found = phases(recording([*one, *two], [*ticks, *more]))
    assert (found.steps, found.step) == (2, 150)
    assert of(0, found).phases["forward"] == pytest.approx(1.5 * 18)
    assert of(0, found).waited_for == {1: pytest.approx(1.5 * 17)}
    assert of(1, found).behind == pytest.approx(1.5 * 15)


def test_communication_on_a_stream_is_hidden_while_a_replica_computes():
    spans = [
        span(0, "step", 0, 100, step=1),
        span(0, "run", 0, 100, run=1, step=1, replicas=2),
        replica(0, 0, 100),
        span(1, "forward", 10, 30),
        span(1, "update", 60, 70),
        replica(1, 0, 100),
        span(2, "backward", 20, 40),
        span(2, "fetch", 80, 90),  # on a replica's own thread: never hidden
        span(3, "stream", 25, 95),
        span(3, "reduce", 25, 65),  # hidden from 25 to 40 and from 60 to 65
        span(3, "reduce", 30, 50),  # within the other one: counted once
        span(3, "copy", 90, 95),
    ]
    assert phases(recording(spans)).hidden_share == pytest.approx((15 + 5) / (40 + 5 + 10))


def test_without_communication_there_is_no_share_of_it():
    spans = [span(0, "run", 0, 10, run=1, step=1, replicas=1), replica(0, 0, 10)]
    found = phases(recording(spans))
    assert found.hidden_share is None
    assert found.json()["hidden_share"] is None


def test_a_wait_for_a_stream_counts_as_what_the_stream_does():
    spans = [
        span(0, "run", 0, 100, run=1, step=1, replicas=1),
        replica(0, 0, 100),
        span(1, "await", 10, 20, role="communication"),
        span(1, "get", 30, 60),
        span(1, "await", 35, 55, role="copy"),
        span(1, "turn", 60, 64, run=1, replica=0, meeting=0),
    ]
    found = of(0, phases(recording(spans)))
    assert found.phases == figures(reduce=10, staging=30, waiting=4, other=56)
    assert found.waited_for == {}


def test_a_meeting_in_the_forward_pass_is_not_forward():
    there = {"run": 1, "meeting": 1}
    spans = [
        span(0, "run", 0, 50, run=1, step=1, replicas=2),
        replica(0, 0, 50),
        span(1, "forward", 0, 40),
        span(1, "wait", 10, 30, replica=0, **there),
        replica(1, 0, 50),
        span(2, "forward", 0, 50),
        span(2, "merge", 24, 28, replica=1, **there),
    ]
    early, late = phases(recording(spans)).replicas
    assert early.phases == figures(forward=20, waiting=14 + 2, other=4 + 10)
    assert early.waited_for == {1: pytest.approx(16)}
    assert late.phases == figures(forward=46, other=4)
    assert (early.own, late.own) == (pytest.approx(30), pytest.approx(46))


def test_without_steps_there_are_no_phases():
    assert phases(recording([span(0, "input", 0, 3)])) is None
    assert phases(recording([span(0, "step", 0, 3, step=1)])) is None
    assert verdict(None) == ["No step of a strategy was recorded."]


# --- words


def test_words_name_the_slow_replica_and_who_waited():
    said = verdict(phases(recording(*slow_step())))
    assert said == [
        "Replica 1 (cpu:1) was slow: in each step it needed 71.00 ms for its own work, 15.00 ms"
        " more than replica 0, which was the fastest.",
        "Meanwhile replica 0 waited for it: 17.00 ms in each step (17 % of it).",
        "Of the time in which replicas exchanged data, 0 % was hidden behind computing.",
        "All figures are means over one step of 100.00 ms.",
    ]


def test_words_say_that_none_was_slow():
    spans = [
        span(0, "run", 0, 100, run=1, step=1, replicas=2),
        replica(0, 0, 96),
        replica(1, 0, 100),
    ]
    said = verdict(phases(recording(spans)))
    assert said[0] == "No replica was slow: the 2 needed about equally long."
    assert said[1] == "They waited for each other 2.00 ms in each step (2 % of it)."
    assert verdict(phases(recording(spans[:2])))[0].startswith("There is one replica")


# --- properties


stretches = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: tuple(sorted(pair)))
)


def moments(some):
    return {moment for start, end in some for moment in range(start, end)}


@given(stretches, stretches)
def test_stretches_are_sets_of_moments(some, others):
    one, other = union(some), union(others)
    assert moments(one) == moments(some) and length(one) == len(moments(some))
    assert all(a[1] < b[0] for a, b in pairwise(one))
    shared = common(one, other)
    assert moments(shared) == moments(some) & moments(others)
    assert length(shared) == len(moments(shared))


KINDS = ("forward", "backward", "reduce", "copy", "stream", "replica")  # the last two have no phase


@st.composite
def nested(draw, start=0, end=60, depth=3):
    spans, at = [], start
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(at, end))
        at = draw(st.integers(begin, end))
        spans.append(span(1, draw(st.sampled_from(KINDS)), begin, at))
        if depth and at > begin:
            spans += draw(nested(begin, at, depth - 1))
    return spans


@given(nested())
def test_a_moment_belongs_to_the_innermost_span_with_a_phase(spans):
    innermost = {}
    for each in spans:  # outer ones come first
        if each.kind not in ("stream", "replica"):
            innermost |= dict.fromkeys(range(each.start // MS, each.end // MS), each.kind)
    found = {}
    row = sorted(spans, key=lambda each: (each.start, -each.end))
    for start, end, inner in segments(row):
        for moment in range(start // MS, end // MS):
            assert moment not in found
            found[moment] = inner.kind
    assert found == innermost


# --- real ones


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("independent", {}),
        ("parameter_server", {}),
        ("parameter_server", {"staged_vars": True}),
        ("replicated", {"all_reduce_spec": "copy"}),
        ("replicated", {"overlap": True}),
        ("replicated", {"variable_consistency": "relaxed"}),
        ("replicated", {"concurrent": False, "all_reduce_spec": "copy"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_phases_of_a_replica_add_up_to_the_step(policy, options, replicas):
    timeline = Timeline()
    with md.Strategy(f"cpu*{replicas}", policy, **options) as strategy, timeline.attached():
        train(strategy, 4)
    found = phases(timeline.recording())
    assert found.steps == 4
    assert [each.replica for each in found.replicas] == list(range(replicas))
    for each in found.replicas:
        assert sum(each.phases.values()) == pytest.approx(found.step)
        assert all(ms >= 0 for ms in each.phases.values())
        assert sum(each.waited_for.values()) <= each.phases["waiting"] + 1e-9
        assert each.replica not in each.waited_for
        assert all(each.phases[name] > 0 for name in ("forward", "backward", "input"))
        assert each.own < found.step
    assert min(each.behind for each in found.replicas) == 0
    assert found.hidden_share is None or 0 <= found.hidden_share <= 1
    assert (found.hidden_share is None) == (policy == "independent")


# --- the bench


def test_the_json_has_phases_and_the_report_says_them():
    output = run(*BENCH, "--all_reduce_spec=copy")
    results = output.results
    assert list(results["phases"]) == list(PHASES)
    assert results["hidden_share"] == 0  # the sums are taken in the meeting
    assert [each["replica"] for each in results["replicas"]] == [0, 1]
    mean = sum(step["seconds"] for step in results["steps"]) * 1e3 / 6
    for each in results["replicas"]:
        assert set(each) == {"replica", "device", "phases", "own", "behind", "waited_for"}
        assert sum(each["phases"].values()) == pytest.approx(mean, rel=0.2)
    assert re.search(
        r"^Phases, in ms of a step\n +forward.*other\n( +\d+\.\d\d){8}$", output.text, re.M
    )


def test_a_run_that_was_complete_before_has_no_phases(tmp_path):
    run(*BENCH, f"--train_dir={tmp_path}")
    again = run(*BENCH, f"--train_dir={tmp_path}", "--seed=1234")
    assert again.results["phases"] is None and again.results["replicas"] is None


def test_all_policies_have_columns_for_waiting_and_what_was_hidden():
    output = run(*BENCH, "--variable_update=all", "--all_reduce_spec=copy")
    assert "waiting" in output.text and "hidden" in output.text
    for name, results in output.results["runs"].items():
        assert set(results["phases"]) == set(PHASES)
        assert (results["hidden_share"] is None) == (name == "independent")


# --- faults


@pytest.mark.parametrize(
    "text", ["slow", "slow:1", "slow:1:x", "slow:1:0.5", "slow:-1:2", "slow:1:inf", "slow:1:nan",
             "fail:0:0", "fail:0:1.5", "quick:0:2", "slow:0:2:3", "", "slow:0:2,", "slow:1:1001"],
)  # fmt: skip
def test_other_faults_are_refused(text):
    status, sentence = refused(f"--inject={text}")
    assert status == 2
    assert "slow:REPLICA:FACTOR or fail:REPLICA:STEP" in sentence


def test_faults_of_replicas_that_there_are_not_are_refused():
    assert refused("--inject=slow:2:3") == (
        2,
        "--inject=slow:2:3 names replica 2, but --num_devices=2 has replicas 0 to 1",
    )
    assert refused("--inject=fail:0:7", *BENCH)[0] == 2
    assert refused("--inject=slow:0:2", "--eval", "--train_dir=nowhere")[0] == 2


def test_a_text_gives_faults_and_they_give_the_text():
    faults = Fault.parse("slow:1:2.5,fail:0:12")
    assert faults == (Fault("slow", 1, 2.5), Fault("fail", 0, 12))
    assert ",".join(map(repr, faults)) == "slow:1:2.5,fail:0:12"


def test_a_slow_pass_takes_so_many_times_what_it_has_computed(monkeypatch):
    clock, slept = [0.0], []
    monkeypatch.setattr(
        "minidist.bench.inject.time",
        SimpleNamespace(perf_counter=lambda: clock[0], sleep=slept.append),
    )
    faults = Faults(Fault.parse("slow:1:3"))
    faults.step = 1

    def computes(seconds):
        clock[0] += seconds

    with observe.attached(faults):
        for number in (0, 1):
            with context.entered(replica_id=number), observe.span("replica", "f"):
                with observe.span("forward", "f"):
                    computes(2.0)
                    with observe.span("wait", "f"):
                        computes(7.0)
                    with observe.span("forward", "a tape within a tape"):
                        computes(0.5)
                with observe.span("update", "f"):
                    computes(1.0)
                with observe.span("backward", "f"):
                    computes(4.0)
    assert slept == [2 * 2.5, 2 * 4.0]


def test_a_slow_replica_is_named():
    output = run(*BENCH, "--inject=slow:1:60")
    assert "\nReplica 1 (cpu:1) was slow: " in output.text
    assert output.results["config"]["inject"] == "slow:1:60"
    first, second = output.results["replicas"]
    assert second["behind"] > 0 and first["waited_for"]["1"] > 0
    assert output.checksums == run(*BENCH).checksums  # slow, but the same


def test_a_replica_fails_in_its_step():
    status, text, errors = call(*BENCH, "--inject=fail:1:3")
    assert status == 1
    assert errors == "minidist.bench: replica 1 was made to fail in step 3, by --inject\n"
    assert "1\timages/sec" in text
    assert observe.watching == ()


def test_nothing_fails_outside_the_steps():
    faults = Faults(Fault.parse("fail:0:1"))
    with observe.attached(faults):
        with observe.span("replica", "a warm-up or an evaluation", replica=0):
            pass
        faults.step = 1
        with pytest.raises(InjectedError), observe.span("replica", "a step", replica=0):
            pass
