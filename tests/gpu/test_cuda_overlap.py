"""Sums beside the backward pass on the stand-in's streams: nobody waits on the host; the trace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import cuda
from policies import EVERY, optimizer
from training import starts

import minidist as md
from minidist.trace import phases
from minidist.trace.recording import Lane, Recording, Span

LAYERS = 6
NET = starts([(16, 16)] * LAYERS)


def deep(strategy: Any) -> Any:
    """Return a step of a deep net whose inputs are on the GPUs already."""
    opt = optimizer("nesterov")
    with strategy.scope():
        variables = [md.Variable(start, name=f"v{i}") for i, start in enumerate(NET)]
    x = strategy.run(lambda: md.constant(np.ones((4, 16), np.float32)))
    labels = strategy.run(lambda: md.constant(np.arange(4)))

    def step(x: Any, labels: Any) -> Any:
        def loss() -> Any:
            h = x
            for v in variables:
                h = md.ops.relu(md.ops.matmul(h, v))
            return md.ops.reduce_mean(md.ops.softmax_cross_entropy(h, labels))

        return opt.minimize(loss, variables, count=4)

    return lambda: strategy.run(step, x, labels)


@pytest.mark.parametrize(
    "policy", [name for name in EVERY if "parameter_server" not in name and "cpu" not in name]
)
def test_no_step_waits_for_a_gpu(
    libraries: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = EVERY[policy]
    with cuda(libraries, 1):
        from minidist.device.cuda_stream import CudaEvent

        with md.Strategy("cuda:0*2", name, **options) as strategy:
            step = deep(strategy)
            step()
            with monkeypatch.context() as patch:
                patch.setattr(CudaEvent, "wait", lambda *_: pytest.fail("waits for a GPU"))
                for _ in range(4):
                    step()


def recorded(libraries: Path, spec: str, **options: Any) -> Any:
    with cuda(libraries, 3), md.Strategy(spec, "replicated", **options) as strategy:
        step = deep(strategy)
        step()
        timeline = md.trace.Timeline()
        with timeline.attached():
            for _ in range(3):
                step()
        return timeline.recording()


@pytest.mark.parametrize("spec", ["cuda:0*2", "cuda*2"])
def test_a_trace_shows_when_streams_did_what(libraries: Path, spec: str) -> None:
    recording = recorded(libraries, spec)
    lanes = {lane.label: number for number, lane in enumerate(recording.lanes)}
    devices = ["cuda:0.0", "cuda:0.1"] if spec == "cuda:0*2" else ["cuda:0", "cuda:1"]
    for device in devices:
        row = [s for s in recording.spans if s.lane == lanes[f"{device} compute stream"]]
        row = [s for s in row if s.end > s.start]
        positions = [s.about["position"] for s in row]
        assert positions == sorted(positions)
        assert all(one.end <= other.start for one, other in pairwise(row))
        assert {s.kind for s in row} == {"work"}
        names = [s.name for s in row]
        assert names.count("matmul") == 3 * (3 * LAYERS - 1) and names.count("momentum") == 3
    sums = [s for s in recording.spans if s.lane == lanes[f"{devices[0]} communication stream"]]
    assert {s.kind for s in sums} == {"reduce"} and {s.name for s in sums} == {"sum"}
    lines = {number: label.split()[1] for label, number in lanes.items()}
    drawn = {(lines[a.lane], lines[a.to_lane]) for a in recording.arrows if a.kind == "event"}
    assert {("compute", "communication"), ("communication", "compute")} <= drawn


@pytest.mark.parametrize(("spec", "launches"), [("cuda:0*2", 1), ("cuda*2", 2)])
def test_buckets_are_summed_while_the_backward_pass_goes_on(
    libraries: Path, spec: str, launches: int
) -> None:
    """With two gradients in a bucket the first sums have ended before the last gradients begin.

    On one GPU a bucket is summed in one launch; of two, each sums one of the gradients.
    """
    recording = recorded(libraries, spec, bucket_cap_mb=2 * NET[0].nbytes / 2**20)
    compute = [s for s in recording.spans if s.kind == "work" and s.name == "matmul"]
    sums = [s for s in recording.spans if s.kind == "reduce" and s.name == "sum"]
    assert len(sums) == 3 * LAYERS // 2 * launches
    assert any(s.end < m.start for s in sums for m in compute)


def test_sums_are_hidden_where_a_gpu_computes_meanwhile() -> None:
    """And not by what the replica's thread does, which only gives work."""
    lanes = [Lane("the program", "program"), Lane("replica 0 (cuda:0)", "replica")]
    lanes += [Lane(f"cuda:0 {role} stream", "stream") for role in ("compute", "communication")]
    run = {"run": 1, "step": 0, "replica": 0, "device": "cuda:0"}
    spans = [
        Span(0, "run", "step", 0, 100, run),
        Span(1, "replica", "step", 0, 100, run),
        Span(1, "backward", "back through the tape", 0, 90),
        Span(2, "work", "matmul", 20, 40),
        Span(3, "reduce", "sum", 30, 70),
    ]
    found = phases(Recording(lanes, spans))
    assert found is not None and found.hidden_share == 0.25


def test_a_trace_of_a_gpu_is_written_and_read(libraries: Path, tmp_path: Path) -> None:
    from minidist.trace import write
    from minidist.trace.chrome import read

    recording = recorded(libraries, "cuda:0*2")
    for name in ("steps.json", "steps.html"):
        write(tmp_path / name, recording)
        back = read(tmp_path / name)
        assert [lane.label for lane in back.lanes] == [lane.label for lane in recording.lanes]
        assert len([s for s in back.spans if s.kind == "work"]) == len(
            [s for s in recording.spans if s.kind == "work"]
        )
