"""docs/one_gradient.md is true: a trace of its program shows what it tells, in its order."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/one_gradient.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` `(\w+)` \|", PAGE, re.MULTILINE)
ORDER = [kind for kind, _, _ in ROWS]


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Run the page's program; return the spans and ticks of its last step, and all arrows."""
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    file = tmp_path_factory.mktemp("trace") / "x.json"
    assert '"one_gradient.html"' in program
    exec(compile(program.replace('"one_gradient.html"', repr(str(file))), "page", "exec"), {})
    trace = json.loads(file.read_text())
    last = trace["minidist"]["steps"][-1]
    for event in trace["traceEvents"]:
        event["end"] = event.get("ts", 0) + event.get("dur", 0)
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] != "M" and last["start"] <= event["ts"] and event["end"] <= last["end"]
    ]


def test_the_page_tells_of_all_kinds_of_rooms():
    assert " ".join(ORDER) == (
        "input replica forward backward gradient arrived wait merge reduce update"
    )


@pytest.mark.parametrize(("kind", "path", "function"), ROWS)
def test_what_a_row_names_is_there(kind, path, function):
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_each_replica_goes_through_the_rooms_in_the_pages_order(events):
    of_lane = defaultdict(list)
    for event in events:
        if event["ph"] in "Xi":
            of_lane[event["tid"]].append(event)
    (inputs,) = [each for each in events if each["cat"] == "input"]
    (reduced,) = [each for each in events if each["cat"] == "reduce" and "step" in each["args"]]
    ways = []
    for row in of_lane.values():
        if any(event["cat"] == "replica" for event in row):
            waits = [
                each for each in row if each["cat"] == "wait" and "meeting" not in each["args"]
            ]
            way = [each for each in row if each["cat"] in ORDER and each not in waits]
            if reduced in way:  # within it is the communicator's own bar
                way = [each for each in way if each["cat"] != "reduce" or each is reduced]
            way.sort(key=lambda event: (event["ts"], -event["end"]))
            assert inputs["end"] <= way[0]["ts"]
            ways.append(["input", *(event["cat"] for event in way)])
            update = way[-1]
            assert reduced["end"] <= update["ts"]
    early = [kind for kind in ORDER if kind not in ("merge", "reduce")]
    late = [kind for kind in ORDER if kind != "wait"]
    assert sorted(ways) == sorted([early, late])


def test_arrows_lead_from_each_gradient_to_the_sum_and_on_to_each_update(events):
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    finishes = [event for event in events if event["ph"] == "f"]
    arrows = [(starts[event["id"]], event) for event in finishes if event["id"] in starts]

    def inside(kind, flow):
        return any(
            event["cat"] == kind
            and event["tid"] == flow["tid"]
            and event["ts"] <= flow["ts"] <= event["end"]
            for event in events
            if event["ph"] == "X"
        )

    found = defaultdict(set)
    for start, finish in arrows:
        kinds = {"gradient": ("backward", "reduce"), "sum": ("reduce", "update")}
        if start["cat"] in kinds:
            before, after = kinds[start["cat"]]
            assert inside(before, start) and inside(after, finish)
            found[start["cat"]].add((start["tid"], finish["tid"]))
    replicas = {event["tid"] for event in events if event["cat"] == "replica"}
    assert {source for source, _ in found["gradient"]} == replicas
    assert {target for _, target in found["sum"]} == replicas
    assert len({target for _, target in found["gradient"]}) == 1


def test_the_bars_have_the_variables_name_and_bytes(events):
    kinds = [event for event in events if event["cat"] in ("update", "reduce")]
    named = [event for event in kinds if "variables" in event["args"]]
    assert len(named) == 3
    for event in named:
        assert event["args"]["variables"] == ["kernel"]
        assert event["args"]["bytes"] == 4 * 3 * 4
