"""What watching costs: steps of a training with a timeline attached, and the same steps without.

    python bench/tracing.py                  # the main job and others, about a minute

Steps with and without alternate within one process. A figure is the median over rounds of a
round's ratio of medians, with the lowest and highest round beside it.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

import minidist as md
from minidist.trace import Timeline
from minidist.train import train_step

ROUNDS, STEPS = 15, 40
JOBS: tuple[tuple[str, int, int, str, dict[str, Any]], ...] = (
    ("lenet", 32, 2, "replicated", {}),
    ("mlp", 32, 2, "replicated", {}),
    ("mlp", 32, 2, "parameter_server", {"staged_vars": True}),
    ("mlp", 32, 4, "parameter_server", {}),
    ("trivial", 32, 2, "replicated", {}),
)


def main() -> None:
    print(f"{'model, policy':<46}{'off':>10}{'on':>10}   on / off")
    for model, batch, n, policy, options in JOBS:
        with md.Strategy(f"cpu*{n}", policy, **options) as strategy:
            off, on, ratios = measure(strategy, model, batch * n)
        name = f"{model}, {policy}{''.join(f' {key}' for key in options)}, {n} replicas"
        low, high = min(ratios), max(ratios)
        middle = statistics.median(ratios)
        print(f"{name:<46}{off:>7.3f} ms{on:>7.3f} ms   {middle:.3f} [{low:.3f} .. {high:.3f}]")


def measure(strategy: md.Strategy, model: str, batch: int) -> tuple[float, float, list[float]]:
    dataset = md.data.load("digits", None, examples=512, seed=1)
    with strategy.scope():
        net = md.models.build(model, dataset.image_shape, dataset.classes)
    optimizer = md.optim.Momentum(0.02)
    feed = iter(strategy.distribute_dataset(md.data.Batches(dataset.train, batch, seed=1)))

    def step(watched: bool) -> float:
        inputs = next(feed)
        with Timeline().attached() if watched else nullcontext():
            started = time.perf_counter()
            strategy.run(train_step, net, optimizer, *inputs)
            return time.perf_counter() - started

    for _ in range(20):
        step(True)
    rounds = []
    for _ in range(ROUNDS):
        times = [(step(False), step(True)) for _ in range(STEPS)]
        rounds.append([statistics.median(each) * 1e3 for each in zip(*times, strict=True)])
    off, on = (statistics.median(each) for each in zip(*rounds, strict=True))
    return off, on, [on / off for off, on in rounds]


if __name__ == "__main__":
    main()
