"""Every implementation of a model's convolutions and products, on one thread, beside each other.

    python bench/kernels.py lenet resnet20
    ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell python bench/kernels.py   # as without AVX-512

One training step tells which work there is; then all the ways to do each work take turns. Figures
are GFLOP/s, from medians of the thread's own time, in which other programs count for little. The
fastest has a star. The last line is the milliseconds of a step's work by each way (`gemm` where it
cannot do it), and by the fastest of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np

import minidist as md
from minidist import observe, threads
from minidist.train import train_step

SHAPES = {  # of images, classes, and images in a batch
    "mlp": ((28, 28, 1), 10, 64),
    "lenet": ((28, 28, 1), 10, 64),
    "resnet20": ((32, 32, 3), 10, 32),
    "resnet50": ((224, 224, 3), 1000, 4),
}
NAMES = ("gemm", "direct", "tiles", "onednn", "onednn-any", "onednn-sgemm")
TURNS = 7


class Works(observe.Observer):
    """Counts the kinds of work of replica 0."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()

    def worked(self, work: Any, implementation: str) -> None:
        if md.get_replica_context().replica_id == 0:
            self.counts[work] += 1


def works(strategy: md.Strategy, model: str) -> Counter[Any]:
    """Return what each replica has to do in a step of training."""
    shape, classes, batch = SHAPES[model]
    with strategy.scope():
        net = md.models.build(model, shape, classes)
        optimizer = md.optim.Momentum(0.01)

    def step() -> None:
        images = md.constant(np.random.default_rng(0).standard_normal((batch, *shape), "f"))
        train_step(net, optimizer, images, md.constant(np.zeros(batch, np.int64)))

    found = Works()
    with observe.attached(found):
        strategy.run(step)
    return found.counts


def turns(work: Any) -> dict[str, float]:
    """Return the median seconds of each way to do a work."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, "f") for shape in work.arrays]
    ways = dict(work.ways())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, run in ways.items():
            started = time.thread_time()
            run(*arrays)
            if turn:
                times[name].append(time.thread_time() - started)
    return {name: statistics.median(each) for name, each in times.items()}


def table(strategy: md.Strategy, model: str) -> None:
    print(f"{model}\n{'':104}" + "".join(f"{name:>14}" for name in NAMES))
    totals = dict.fromkeys((*NAMES, "fastest"), 0.0)
    for work, count in works(strategy, model).items():
        times = turns(work)
        fastest = min(times, key=times.__getitem__)
        cells = ""
        for name in NAMES:
            star = "*" if name == fastest else " "
            speed = f"{work.operations / times[name] / 1e9:.0f}{star}" if name in times else ""
            cells += f"{speed:>14}"
            # Work that a way cannot do is done by the way of everything.
            totals[name] += 1e3 * count * times.get(name, times["gemm"])
        totals["fastest"] += 1e3 * count * times[fastest]
        print(f"{f'{count} x {work.name}':104}{cells}")
    print("ms of a step by " + ", ".join(f"{name} {ms:.1f}" for name, ms in totals.items()) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("models", nargs="*", metavar="model", default=["lenet", "resnet20"])
    models = parser.parse_args().models
    with md.Strategy(f"cpu*{threads.cores()}") as strategy:  # so each replica has one thread
        for model in models:
            table(strategy, model)


if __name__ == "__main__":
    main()
