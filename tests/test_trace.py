"""Traces: files that are whole and true, of hand-made recordings and of real trainings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
from benching import call, fresh, refused
from recordings import recording, slow_step, span, tick, traced, train

import minidist as md
from minidist import observe
from minidist.errors import DataError, UsageError
from minidist.trace import Timeline, phases, write
from minidist.trace.__main__ import main
from minidist.trace.chrome import MANY, read

POLICIES = [
    ("independent", {}),
    ("parameter_server", {}),
    ("parameter_server", {"staged_vars": True}),
    ("replicated", {"overlap": False}),
    ("replicated", {"all_reduce_spec": "copy"}),
    ("replicated", {"overlap": True, "bucket_cap_mb": 1e-5}),
    ("replicated", {"variable_consistency": "relaxed"}),
]
BENCH = ("--model=trivial", "--num_batches=6", "--num_warmup_batches=1")


def by_kind(trace, ph="X"):
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == ph:
            found[event["cat"]].append(event)
    return found


def nanoseconds(event):
    start = round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0) * 1000)


def encloses(outer, inner):
    (a, b), (c, d) = nanoseconds(outer), nanoseconds(inner)
    return outer["tid"] == inner["tid"] and a <= c and d <= b


@pytest.fixture(scope="module", params=POLICIES, ids=str)
def trace(request, tmp_path_factory):
    policy, options = request.param
    path = tmp_path_factory.mktemp("trace") / "x.json"
    return SimpleTrace(policy, options, path, traced(path, replicas=3, policy=policy, **options))


class SimpleTrace:
    def __init__(self, policy, options, path, json):
        self.policy, self.options, self.path, self.json = policy, options, path, json
        self.events = json["traceEvents"]
        self.meets = policy != "independent"


# --- real ones


def test_every_event_has_what_the_format_asks_for(trace):
    for event in trace.events:
        assert event["ph"] in "XisfM" and event["pid"] == 1 and event["tid"] >= 1
        if event["ph"] != "M":
            assert event["ts"] >= 0 and event["name"] and event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"


def test_there_is_a_lane_for_each_replica_and_each_stream_in_use(trace):
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace.events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert len(set(names.values())) == len(names)
    assert {event["tid"] for event in trace.events} - {1} <= set(names)
    assert {f"replica {i} (cpu:{i})" for i in range(3)} < set(names.values())
    assert {"the program", "reads input ahead"} < set(names.values())
    if "relaxed" in trace.options.values() or trace.options.get("overlap"):
        assert "cpu:0 communication stream" in names.values()


def test_spans_of_a_lane_nest(trace):
    lanes = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "X":
            lanes[event["tid"]].append(event)
    for row in lanes.values():
        open_spans = []
        for event in sorted(row, key=lambda each: (nanoseconds(each)[0], -nanoseconds(each)[1])):
            while open_spans and nanoseconds(open_spans[-1])[1] <= nanoseconds(event)[0]:
                open_spans.pop()
            assert not open_spans or encloses(open_spans[-1], event), (open_spans[-1], event)
            open_spans.append(event)


def test_every_flow_begins_and_ends_once_inside_spans(trace):
    ends = defaultdict(list)
    spans = [event for event in trace.events if event["ph"] == "X"]
    for event in trace.events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            assert any(encloses(span, event) for span in spans), event
    for start, finish in ends.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])


def test_each_step_has_each_replicas_passes(trace):
    spans = by_kind(trace.json)
    assert len(trace.json["minidist"]["steps"]) == 4
    for kind in ("replica", "forward", "backward"):
        assert len(spans[kind]) == 4 * 3
    for replica in spans["replica"]:
        inside = [each for kind in spans.values() for each in kind if encloses(replica, each)]
        kinds = Counter(each["cat"] for each in inside)
        assert kinds["forward"] == kinds["backward"] == 1


def test_replicas_arrive_and_wait_for_the_one_that_merges(trace):
    spans, ticks = by_kind(trace.json), by_kind(trace.json, "i")
    meetings = defaultdict(set)
    for arrival in ticks["arrived"]:
        about = arrival["args"]
        meetings[about["run"], about["meeting"]].add(about["replica"])
    in_parts = trace.options == {"overlap": False}  # then all meet again after the update
    assert len(meetings) == (4 + 4 * in_parts if trace.meets else 0)
    merged_by = {}
    for merge in spans["merge"]:
        about = merge["args"]
        merged_by[about["run"], about["meeting"]] = about["replica"]
    assert merged_by.keys() == meetings.keys()
    assert all(who == {0, 1, 2} for who in meetings.values())
    for wait in spans["wait"]:
        about = wait["args"]
        assert wait["name"] == f"waits for replica {about['for']}"
        assert about["for"] != about["replica"]
        if "meeting" in about:
            assert about["for"] == merged_by[about["run"], about["meeting"]]
    of_meetings = [wait for wait in spans["wait"] if "meeting" in wait["args"]]
    assert len(of_meetings) == 2 * len(meetings)


def test_a_gradients_way_is_drawn(trace):
    spans, flows = by_kind(trace.json), by_kind(trace.json, "s")
    gradients = by_kind(trace.json, "i")["gradient"]
    assert len(gradients) == 4 * 3 * 3
    assert {tick["args"]["bytes"] for tick in gradients} == {16}
    assert {tick["name"] for tick in gradients} == {f"gradient of w{i}" for i in range(3)}
    places = 1 if trace.policy == "parameter_server" else 3
    assert len(spans["update"]) == 4 * places
    for update in spans["update"]:
        assert update["args"]["variables"] == ["w0", "w1", "w2"]
        assert update["args"]["bytes"] == 3 * 16
    if trace.options == {"overlap": False}:  # each update adds up all replicas' gradients
        assert len(flows["gradient"]) == 4 * 3 * 3
        assert not flows["sum"] and not spans["reduce"]
        assert {update["args"]["replicas"] for update in spans["update"]} == {3}
    elif trace.meets:
        sums = [each for each in spans["reduce"] if "variables" in each["args"]]
        buckets = 3 if trace.options.get("overlap") else 1
        late = "variable_consistency" in trace.options
        assert len(sums) >= 4 * buckets - late
        assert len(flows["gradient"]) >= 3 * (4 * buckets - late)
        # The first update of a relaxed trace has sums of before it.
        assert len(flows["sum"]) >= places * buckets * (4 - late)
    else:
        assert len(flows["gradient"]) == 4 * 3
        assert not flows["sum"] and not spans["reduce"]


def test_arrows_lead_from_put_to_get_and_from_record_to_wait(trace):
    spans, starts, ends = (
        by_kind(trace.json),
        by_kind(trace.json, "s"),
        by_kind(trace.json, "f"),
    )
    if "staged_vars" in trace.options:
        assert len(starts["put"]) >= 3 * 3
        for kind, flows in (("put", starts), ("get", ends)):
            for flow in flows["put"]:
                assert any(encloses(span, flow) for span in spans[kind])
    else:
        assert not starts["put"]
    if "variable_consistency" in trace.options:
        assert starts["event"]


def test_what_is_fetched_has_its_name_and_bytes(trace):
    fetched = by_kind(trace.json)["fetch"]
    if trace.policy != "parameter_server" or trace.options:
        assert not fetched
    else:
        assert len(fetched) == 4 * 3 * 3
        assert {each["args"]["origin"] for each in fetched} == {"host"}
        assert {each["args"]["bytes"] for each in fetched} == {16}


def test_a_file_says_what_the_recording_said(trace, tmp_path):
    again = phases(read(trace.path))
    assert again.json() == trace.json["minidist"]["phases"]
    page = tmp_path / "x.html"
    write(page, read(trace.path))
    assert phases(read(page)).phases == pytest.approx(again.phases)


def test_the_summary_has_a_row_for_each_phase(trace, capsys):
    assert main(["summary", str(trace.path)]) == 0
    text = capsys.readouterr().out
    for row in ("ms per step", "forward", "waiting", "reduce", "own", "behind the fastest"):
        assert re.search(rf"^{row}  ", text, re.MULTILINE), row
    assert "replica 2" in text and "hidden share of communication: " in text
    assert trace.json["minidist"]["verdict"][0] in text


# --- by hand


def test_a_recording_by_hand_as_events(tmp_path):
    write(tmp_path / "x.json", recording(*slow_step()))
    trace = json.loads((tmp_path / "x.json").read_text())
    spans = by_kind(trace)
    assert [(each["name"], each["ts"], each["dur"]) for each in spans["wait"]] == [
        ("waits for replica 1", 50_000, 22_000),
        ("waits for replica 1", 90_000, 5_000),  # at the end of the run
    ]
    (reduce,) = spans["reduce"]
    assert reduce["args"] == {"step": 1, "variables": ["w"], "bytes": 8}
    flows = [
        (event["cat"], event["tid"], event["ts"])
        for event in trace["traceEvents"]
        if event["ph"] in "sf"
    ]
    sum_end = 68_000 - 0.001
    assert flows == [
        *[("gradient", 2, 48_000), ("gradient", 3, 62_000)],
        *[("gradient", 3, 58_000), ("gradient", 3, 62_000)],
        *[("sum", 3, sum_end), ("sum", 3, 70_000)],
        *[("sum", 3, sum_end), ("sum", 2, 72_000)],
    ]
    assert trace["minidist"]["steps"] == [{"step": 1, "start": 0, "end": 100_000}]


def test_arrows_are_of_the_same_item_event_and_step():
    spans = [span(0, "put", 0, 10), span(1, "get", 20, 30), span(1, "await", 32, 40, role="copy")]
    ticks = [
        tick(0, "put", 1, "7"),
        tick(0, "recorded", 2, "copy 1"),
        tick(0, "put", 3, "8"),
        tick(0, "put", 5, "7"),  # the slot is used again
        tick(1, "got", 25, "7"),
        tick(1, "got", 26, "9"),  # put before anybody watched
        tick(1, "waited", 35, "copy 1"),
        tick(1, "waited", 36, "copy 1"),
    ]
    found = recording(spans, ticks).arrows
    assert [(each.kind, each.at // 10**6, each.to // 10**6) for each in found] == [
        ("event", 2, 35),
        ("put", 5, 25),
    ]


def test_the_last_steps_are_cut_out():
    steps = [slow_step(at=200 * i, step=i + 1) for i in range(5)]
    whole = recording([s for spans, _ in steps for s in spans], [t for _, ts in steps for t in ts])
    part = whole.last(2)
    assert [window.step for window in part.windows()] == [4, 5]
    assert min(span.start for span in part.spans) == 600 * 10**6
    assert len(part.spans) == 2 * len(steps[0][0])
    assert len(part.ticks) == 2 * len(steps[0][1]) and len(part.arrows) == 2 * 4
    assert phases(part).phases == phases(recording(*slow_step())).phases
    assert whole.last(100).spans == whole.spans or len(whole.last(100).spans) == len(whole.spans)


def test_long_lists_of_variables_are_cut(tmp_path):
    names = [f"w{i}" for i in range(100)]
    spans = [span(0, "update", 0, 1, step=1, variables=names, bytes=8)]
    write(tmp_path / "x.json", recording(spans))
    (event,) = by_kind(json.loads((tmp_path / "x.json").read_text()))["update"]
    assert event["args"]["variables"] == [*names[:MANY], "… 100 in all"]


# --- recording


def test_nothing_is_heard_before_and_after():
    timeline = Timeline()
    with observe.span("step", "before", step=0):
        pass
    with timeline.attached(), observe.span("step", "within", step=1):
        pass
    with observe.span("step", "after", step=2):
        pass
    assert [each.name for each in timeline.recording().spans] == ["within"]
    assert observe.watching == ()


def test_memory_is_bounded_and_only_whole_steps_count():
    timeline = Timeline(entries=100)
    with md.Strategy("cpu*2") as strategy, timeline.attached():
        train(strategy, 60)
    found = timeline.recording()
    per_lane = Counter(each.lane for each in (*found.spans, *found.ticks))
    assert max(per_lane.values()) == 100
    assert 0 < len(found.windows()) < 60
    for each in phases(found).replicas:
        assert sum(each.phases.values()) == pytest.approx(phases(found).step)
        assert each.phases["forward"] > 0


def test_a_span_that_goes_on_ends_now():
    timeline = Timeline()
    with timeline.attached(), observe.span("step", "open", step=1):
        (open_span,) = timeline.recording().spans
    (closed,) = timeline.recording().spans
    assert open_span.start < open_span.end <= closed.end


def test_two_timelines_hear_the_same():
    one, other = Timeline(), Timeline()
    with one.attached(), other.attached(), md.Strategy("cpu*2") as strategy:
        strategy.run(lambda: None)
    kinds = [Counter(span.kind for span in each.recording().spans) for each in (one, other)]
    assert kinds[0] == kinds[1] and kinds[0]["replica"] == 2


# --- md.trace


@pytest.mark.parametrize("name", ["x.txt", "x", "x.json.gz"])
def test_other_endings_are_refused_before_anything_runs(name, tmp_path):
    with pytest.raises(UsageError, match="ends with"), md.trace(tmp_path / name):
        pytest.fail("it ran")


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(UsageError, match="at least 1"), md.trace(tmp_path / "x.json", steps=0):
        pytest.fail("it ran")


def test_a_failure_is_traced_too(tmp_path):
    path = tmp_path / "x.json"

    def fails():
        with md.trace(path), md.Strategy("cpu*2") as strategy:
            train(strategy, 2)
            strategy.run(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(by_kind(json.loads(path.read_text()))["run"]) == 3
    assert observe.watching == ()


def test_without_a_strategy_there_is_still_a_file(tmp_path, capsys):
    path = tmp_path / "x.json"
    with md.trace(path), md.GradientTape():
        md.constant(1.0)
    assert list(by_kind(json.loads(path.read_text()))) == ["forward"]
    assert main(["summary", str(path)]) == 2
    assert "has no whole step in it" in capsys.readouterr().err


def test_saving_is_told(tmp_path):
    with md.Strategy("cpu*1") as strategy, md.trace(tmp_path / "x.json"):
        with strategy.scope():
            w = md.Variable(np.ones(2, np.float32), name="w")
        md.save(tmp_path / "w.safetensors", w)
    (save,) = by_kind(json.loads((tmp_path / "x.json").read_text()))["save"]
    assert save["args"]["path"].endswith("w.safetensors")


# --- the commands


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '{"traceEvents": []}', "<html></html>",
                                  '{"traceEvents": [{}], "minidist": 1}', "\x00"])  # fmt: skip
def test_files_that_are_no_trace_exit_with_2(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["summary", str(path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"minidist.trace: {path} is no trace of minidist; ")
    assert errors.count("\n") == 1
    with pytest.raises(DataError):
        read(path)


@pytest.mark.parametrize("how", ["deep", "endless", "nameless", "twice"])
def test_traces_that_were_changed_exit_with_2(how, tmp_path, capsys):
    path = tmp_path / "x.json"
    with md.Strategy("cpu*2") as strategy, md.trace(path):
        for _ in range(3):
            strategy.run(lambda: md.get_replica_context().merge_call(lambda s: None))
    trace = json.loads(path.read_text())
    if how == "endless":
        next(event for event in trace["traceEvents"] if event["ph"] == "X")["dur"] = 1e308
    elif how == "nameless":
        for event in trace["traceEvents"]:
            event["name"] = {}
    elif how == "twice":
        trace["traceEvents"] += trace["traceEvents"]
    path.write_text("[" * 200_000 if how == "deep" else json.dumps(trace))
    assert main(["summary", str(path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("minidist.trace: ") and errors.count("\n") == 1


def test_files_that_cannot_be_read_exit_with_2(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "binary"):
        assert main(["summary", str(path)]) == 2
        assert "cannot be read as a trace" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["summary"], ["show", "x"], ["summary", "x", "y"]])
def test_other_arguments_exit_with_2(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_the_command_and_the_bench_write_and_read_the_same_file(tmp_path):
    path = tmp_path / "x.json"
    output = fresh(*BENCH, f"--trace_file={path}", "--trace_steps=3")
    trace = json.loads(path.read_text())
    assert [each["step"] for each in trace["minidist"]["steps"]] == [4, 5, 6]
    assert output.results["config"]["trace_file"] == str(path)
    done = subprocess.run(
        [sys.executable, "-m", "minidist.trace", "summary", path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(trace["minidist"]["verdict"][0])
    assert done.stderr == ""


def test_the_module_of_the_command_can_still_be_called(tmp_path):
    import minidist.trace

    assert minidist.trace is md.trace
    with minidist.trace(tmp_path / "x.json"):
        pass


def test_each_policy_has_a_file_of_its_own(tmp_path):
    fresh(*BENCH, "--variable_update=all", f"--trace_file={tmp_path / 'x.html'}")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("x.independent.html", "x.parameter_server.html", "x.parameter_server+staged_vars.html"),
        *("x.replicated.html", "x.replicated+relaxed.html"),
    }


def test_a_failing_run_leaves_a_trace(tmp_path):
    path = tmp_path / "x.json"
    assert call(*BENCH, "--inject=fail:0:3", f"--trace_file={path}")[0] == 1
    assert json.loads(path.read_text())["minidist"]["steps"][-1]["step"] == 3


def test_bad_flags_are_refused(tmp_path):
    assert refused(f"--trace_file={tmp_path / 'x.txt'}")[0] == 2
    assert refused(f"--trace_file={tmp_path / 'none' / 'x.json'}")[0] == 2
    assert refused("--trace_steps=3")[0] == 2
    assert refused(f"--trace_file={tmp_path / 'x.json'}", "--trace_steps=0")[0] == 2
