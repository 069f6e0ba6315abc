"""What the machinery costs when there is nothing to do, and what a strategy adds to a plain loop.

    python bench/overhead.py                 # all, about a minute
    python bench/overhead.py merge run       # some

Each figure is the median over rounds of a round's median, with the lowest and highest round beside
it. Measurements that are compared alternate within one process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from unittest import mock

import numpy as np
from peers.networks import NETWORKS
from threadpoolctl import threadpool_limits

import minidist as md
from minidist import observe
from minidist.device.cpu import CpuDevice
from minidist.instruments.primitives import Kept, told
from minidist.train import train_step

ROUNDS = 15


def nothing(*_: object) -> None:
    pass


def show(name: str, rounds: Sequence[float], unit: str, target: str = "") -> None:
    middle, low, high = statistics.median(rounds), min(rounds), max(rounds)
    print(f"{name:<52}{middle:>9.1f} {unit:<3} [{low:.1f} .. {high:.1f}]  {target}", flush=True)


def merge() -> None:
    """Time one empty merge_call in each of n replicas, per call."""
    for n, target in ((2, "target: 15"), (8, "target: 100")):

        def calls() -> float:
            replica = md.get_replica_context()
            assert replica is not None
            times = []
            for _ in range(500):
                started = time.perf_counter()
                replica.merge_call(nothing)
                times.append(time.perf_counter() - started)
            return statistics.median(times)

        with md.Strategy(f"cpu*{n}") as strategy:
            rounds = [
                statistics.mean(strategy.local_results(strategy.run(calls))) * 1e6
                for _ in range(ROUNDS)
            ]
        show(f"merge_call with nothing to do, {n} replicas", rounds, "us", target)


def run() -> None:
    """Time strategy.run of an empty function."""
    for n, target in ((1, ""), (2, "target: 40"), (8, "")):
        with md.Strategy(f"cpu*{n}") as strategy:
            rounds = [median_time(lambda: strategy.run(nothing), 300) * 1e6 for _ in range(ROUNDS)]
        show(f"run of an empty function, {n} replicas", rounds, "us", target)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_time(call: Callable[[], object], times: int) -> float:
    return statistics.median(timed(call) for _ in range(times))


def plain() -> None:
    """Compare a step of mlp under a strategy of one device with the same step in a plain loop."""
    generator = np.random.default_rng(0)
    images = md.constant(generator.standard_normal((64, 28, 28, 1)).astype(np.float32))
    labels = md.constant(generator.integers(0, 10, 64))

    def job() -> tuple[md.nn.Sequential, md.optim.Optimizer]:
        return md.models.build("mlp", (28, 28, 1), 10), md.optim.Momentum(0.01)

    strategy = md.Strategy("cpu*1")
    strategy.run(nothing)  # from here on the strategy holds BLAS to all cores for its one replica
    with threadpool_limits(1, user_api="blas"):
        alone = job()
        with strategy.scope():
            inside = job()
        steps = {
            "plain loop": lambda: train_step(*alone, images, labels),
            "one device": lambda: strategy.run(train_step, *inside, images, labels),
        }
        for call in steps.values():
            median_time(call, 20)
        blocks = in_turns(steps, turns=3 * ROUNDS, together=10)
        single = in_turns(steps, turns=20 * ROUNDS, together=1)
    strategy.close()
    for name, measured in blocks.items():
        show(f"mlp, batch 64, one BLAS thread: {name}", by_round(measured, 1e6), "us")
    for words, times in (("blocks of ten steps", blocks), ("single steps", single)):
        ratios = [b / a for a, b in zip(*times.values(), strict=True)]
        show(f"  ratio, {words} in turns", by_round(ratios, 100), "%", "target: 103")


def in_turns(
    calls: dict[str, Callable[[], object]], turns: int, together: int
) -> dict[str, list[float]]:
    """Return the median seconds of each call's blocks of `together` calls, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(median_time(call, together))
    return times


def by_round(values: Sequence[float], scale: float) -> list[float]:
    size = len(values) // ROUNDS
    return [statistics.median(values[i * size : (i + 1) * size]) * scale for i in range(ROUNDS)]


def primitives() -> None:
    """Compare steps of two replicas with their own operations, each timed alone, in turns."""
    for name, network in NETWORKS.items():
        random = np.random.default_rng(0)
        with md.Strategy("cpu*2") as strategy:
            with strategy.scope():
                model = md.models.build(name, network.image, network.classes)
            optimizer = md.optim.Momentum(0.001)
            images = random.standard_normal((network.batch, *network.image), np.float32)
            labels = random.integers(0, network.classes, network.batch)
            places = [strategy.run(md.constant, x) for x in (images, labels)]
            step = partial(strategy.run, train_step, model, optimizer, *places)
            median_time(step, 5)
            times = []
            for _ in range(ROUNDS):
                whole, kept = median_time(step, 7), Kept()
                with told(), observe.attached(kept):
                    step()
                times.append((whole, max(kept.alone(strategy).values())))
        show(f"{name}, 2 replicas: a step", [1e3 * a for a, _ in times], "ms")
        show("  its operations alone", [1e3 * b for _, b in times], "ms")
        show("  ratio", [100 * a / b for a, b in times], "%", "target: 110")


def importing() -> None:
    """Compare fresh interpreters that import numpy, and minidist."""

    def start(module: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        return time.perf_counter() - started

    for module in ("numpy", "minidist"):
        start(module)
    times = [(start("numpy") * 1e3, start("minidist") * 1e3) for _ in range(ROUNDS)]
    show("import numpy", [a for a, _ in times], "ms")
    show("import minidist", [b for _, b in times], "ms")
    show("  minidist adds", [b - a for a, b in times], "ms", "target: 100")


def memory() -> None:
    """Compare steps in the memory of heaps with steps in that of the C library."""
    shape, batch = (32, 32, 3), 32
    generator = np.random.default_rng(0)
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            model, optimizer = md.models.build("resnet20", shape, 10), md.optim.Momentum(0.01)
        images = generator.standard_normal((batch, *shape), np.float32)
        places = [strategy.run(md.constant, x) for x in (images, generator.integers(0, 10, batch))]

        def step() -> None:
            strategy.run(train_step, model, optimizer, *places)

        def unsettled() -> None:
            with mock.patch.object(CpuDevice, "settle"):
                step()

        def faults(call: Callable[[], object]) -> int:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            call()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        ways = {"the C library's memory": unsettled, "a heap for each device": step}
        for call in ways.values():
            median_time(call, 3)
        times = in_turns(ways, turns=ROUNDS, together=3)
        for name, call in ways.items():
            show(f"resnet20, 2 devices: {name}", by_round(times[name], 1e3), "ms")
            show("  page faults in a step", [faults(call) for _ in range(ROUNDS)], "")


MEASUREMENTS = {
    "merge": merge,
    "run": run,
    "plain": plain,
    "memory": memory,
    "primitives": primitives,
    "import": importing,
}


def measure(words: str | None, measurements: Mapping[str, Callable[[], None]]) -> None:
    """Do what the command line names of some measurements, else all of them."""
    parser = argparse.ArgumentParser(description=(words or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", default=[*measurements], help=", ".join(measurements))
    chosen = parser.parse_args().what
    for name in chosen:
        if name not in measurements:
            parser.error(f"there is no measurement {name!r}; choose from {', '.join(measurements)}")
    for name in chosen:
        measurements[name]()


if __name__ == "__main__":
    measure(__doc__, MEASUREMENTS)
