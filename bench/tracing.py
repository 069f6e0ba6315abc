"""What watching costs: steps of a training with a timeline attached, and the same steps without.

    python bench/tracing.py                  # the main job and others, about two minutes

Steps that are watched, steps that are not, and as many more that are not, to see the noise, come in
random order within one process. A ratio is of a round's medians; the median over rounds is shown,
and the lowest and highest round.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import nullcontext
from typing import Any

import minidist as md
from minidist.trace import Timeline
from minidist.train import train_step

ROUNDS, STEPS = 15, 60
JOBS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("lenet", 2, "replicated", {}),
    ("mlp", 2, "replicated", {}),
    ("mlp", 2, "parameter_server", {"staged_vars": True}),
    ("mlp", 4, "parameter_server", {}),
    ("trivial", 2, "replicated", {}),
)
KINDS = ("off", "off again", "on")


def main() -> None:
    for model, n, policy, options in JOBS:
        name = f"{model}, {policy}{''.join(f' {key}' for key in options)}, {n} replicas"
        with md.Strategy(f"cpu*{n}", policy, **options) as strategy:
            rounds = measure(strategy, model)
        print(f"{name:<48}{statistics.median(row['off'] for row in rounds):>9.3f} ms")
        for kind in KINDS[1:]:
            ratios = [row[kind] / row["off"] for row in rounds]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            limit = "  target: at most 1.03" if kind == "on" else ""
            print(f"  {kind:<46}{middle:>9.3f}    [{low:.3f} .. {high:.3f}]{limit}", flush=True)


def measure(strategy: md.Strategy, model: str) -> list[dict[str, float]]:
    dataset = md.data.load("digits", None, examples=512, seed=1)
    with strategy.scope():
        net = md.models.build(model, dataset.image_shape, dataset.classes)
    optimizer = md.optim.Momentum(0.02)
    batches = md.data.Batches(dataset.train, 32 * strategy.num_replicas, seed=1)
    feed = iter(strategy.distribute_dataset(batches))
    timeline = Timeline()

    def step(kind: str) -> float:
        inputs = next(feed)
        with timeline.attached() if kind == "on" else nullcontext():
            started = time.perf_counter()
            strategy.run(train_step, net, optimizer, *inputs)
            return (time.perf_counter() - started) * 1e3

    rounds = []
    for _ in range(ROUNDS):
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for kind in random.sample(KINDS * STEPS, len(KINDS) * STEPS):
            times[kind].append(step(kind))
        rounds.append({kind: statistics.median(each) for kind, each in times.items()})
    return rounds


if __name__ == "__main__":
    main()
