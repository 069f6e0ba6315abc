"""Recordings made by hand, in whole milliseconds, and recordings of real trainings."""

from __future__ import annotations

import json

import numpy as np

import minidist as md
from minidist.trace.arrows import arrows
from minidist.trace.recording import Lane, Recording, Span, Tick

MS = 1_000_000
LANES = [
    Lane("the program", "program"),
    Lane("replica 0 (cpu:0)", "replica"),
    Lane("replica 1 (cpu:1)", "replica"),
    Lane("cpu:0 communication stream", "stream"),
]


def span(lane, kind, start, end, name="", **about):
    return Span(lane, kind, name or kind, start * MS, end * MS, about)


def tick(lane, kind, at, name="", **about):
    return Tick(lane, kind, name or kind, at * MS, about)


def replica(number, start, end, run=1, step=1):
    about = {"run": run, "replica": number, "device": f"cpu:{number}", "step": step}
    return span(number + 1, "replica", start, end, "train_step", **about)


def recording(spans, ticks=()):
    spans = sorted(spans, key=lambda span: (span.start, -span.end))
    ticks = sorted(ticks, key=lambda tick: tick.at)
    return Recording(LANES, spans, ticks, arrows(spans, ticks))


def slow_step(at=0, step=1):
    """Give a step of 100 ms in which replica 1 is slow and merges; replica 0 waits for it."""
    there = {"run": step, "meeting": 1}
    spans = [
        span(0, "step", 0, 100, step=step),
        span(0, "input", 0, 10),
        span(0, "run", 10, 100, "train_step", run=step, step=step, replicas=2),
        replica(0, 12, 90, step, step),
        span(1, "forward", 12, 30),
        span(1, "backward", 30, 50),
        span(1, "wait", 50, 72, replica=0, **there),
        span(1, "update", 72, 88, step=step, place=0, variables=["w"], bytes=8),
        replica(1, 14, 95, step, step),
        span(2, "forward", 14, 40),
        span(2, "backward", 40, 60),
        span(2, "merge", 60, 70, replica=1, **there),
        span(2, "reduce", 62, 68, "gradients", step=step, variables=["w"], bytes=8),
        span(2, "update", 70, 92, step=step, place=1, variables=["w"], bytes=8),
    ]
    ticks = [
        tick(1, "gradient", 48, "w", bytes=8),
        tick(2, "gradient", 58, "w", bytes=8),
        tick(1, "arrived", 50, replica=0, **there),
        tick(2, "arrived", 60, replica=1, **there),
    ]
    for each in spans:
        each.start, each.end = each.start + at * MS, each.end + at * MS
    for each in ticks:
        each.at += at * MS
    return spans, ticks


# --- real ones


def train(strategy, steps, variables=3, wait=lambda: None):
    """Train some variables, each a vector, on a batch that is read from a data set."""
    with strategy.scope():
        weights = [md.Variable(np.ones(4, np.float32), name=f"w{i}") for i in range(variables)]
    optimizer = md.optim.SGD(0.1)

    def step(x):
        def loss():
            return sum(
                (md.ops.reduce_mean(x * w) for w in weights[1:]), md.ops.reduce_mean(x * weights[0])
            )

        return optimizer.minimize(loss, weights)

    batches = [np.ones((strategy.num_replicas, 4), np.float32) for _ in range(steps)]
    for batch in strategy.distribute_dataset(batches):
        strategy.run(step, batch)


def traced(path, *, steps=4, replicas=2, policy="replicated", **options):
    """Return what `md.trace` writes of a training, as JSON has it."""
    with md.Strategy(f"cpu*{replicas}", policy, **options) as strategy, md.trace(path, steps=steps):
        train(strategy, steps + 1)
    return json.loads(path.read_text())
