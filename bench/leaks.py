"""What many runs leave behind, and many openings and closings: threads, open files and memory.

    python bench/leaks.py                       # both, some minutes
    python bench/leaks.py --runs=5000           # quicker
    python bench/leaks.py --openings=0          # only the runs

The runs are of a function that meets four times: an all_reduce with its gradient, a variable's
assignment, a run inside a merge function. Every hundredth fails, in turn in a replica and in a
merge function. Openings are those of all that has threads, files or buffers of its own: a strategy
of each policy that trains, an area, an iterator that is closed or dropped in the middle, a folder
of checkpoints, summaries. "Before" is after a first hundredth: by then all that is kept once has
been made.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md


def held() -> dict[str, float]:
    """Return what the process holds now, or as soon as the readers of dropped data have ended."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("minidist reader"):
            thread.join(5)
    gc.collect()  # what they still held
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "objects that Python tracks": len(gc.get_objects()),
        "resident memory, MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    }


# --- runs ---------------------------------------------------------------------------------------


class Planned(Exception):
    """The failure of every hundredth run."""


def meetings(variable: md.Variable, fails: str) -> float:
    """Meet in every way, and fail in a replica or in a merge function."""
    replica = md.get_replica_context()
    assert replica is not None
    if fails == "replica" and replica.replica_id == 1:
        raise Planned(fails)
    with md.GradientTape() as tape:
        x = variable * (replica.replica_id + 1.0)
        loss = md.ops.reduce_sum(replica.all_reduce("mean", {"x": x})["x"])
    gradient = tape.gradient(loss, variable)
    variable.assign_sub(gradient * 1e-6)
    return float(replica.merge_call(nested, fails))


def nested(strategy: md.Strategy, fails: str) -> float:
    if fails == "merge function":
        raise Planned(fails)
    return float(strategy.reduce("sum", strategy.run(identity)))


def identity() -> float:
    replica = md.get_replica_context()
    assert replica is not None
    return replica.replica_id + 0.5


def run(strategy: md.Strategy, variable: md.Variable, runs: int) -> None:
    for number in range(runs):
        fails = "" if number % 100 else ("replica" if number % 200 else "merge function")
        try:
            strategy.run(meetings, variable, fails)
            assert not fails
        except Planned:
            assert fails


# --- openings and closings ----------------------------------------------------------------------


def strategy(variable_update: str, **options: Any) -> None:
    """Train one step and close."""
    with md.Strategy("cpu*2", variable_update, **options) as strategy:
        with strategy.scope():
            variable = md.Variable(np.ones(100, "float32"))
        optimizer = md.optim.Momentum(0.1)

        def step() -> None:
            optimizer.minimize(lambda: md.ops.reduce_sum(variable * variable), [variable])

        strategy.run(step)


def area() -> None:
    """Put in three, take out one; the others are in it when it is closed."""
    with md.StagingArea(["float32"], capacity=4) as area:
        for _ in range(3):
            area.put((np.ones(50_000, "float32"),))
        area.get()


def iterator(close: bool) -> None:
    """Read two batches of many, and close the data set or drop all of it."""
    with md.Strategy("cpu*2") as strategy:
        dataset = strategy.distribute_dataset([np.ones((4, 100), "float32")] * 50)
        iterator = iter(dataset)
        next(iterator)
        next(iterator)
        if close:
            dataset.close()


def files(folder: Path) -> None:
    """Save and load a checkpoint, and write summaries in each format."""
    variable = md.Variable(np.ones(100, "float32"), name="v")
    with md.TrainDir(folder, keep=1) as checkpoints:
        checkpoints.save((checkpoints.newest() or 0) + 1, variable)
        checkpoints.load(variable)
    for name in ("log.jsonl", "log.csv", "log.tfevents"):
        (folder / name).unlink(missing_ok=True)
        with md.SummaryWriter(folder / name) as writer:
            writer.histogram("v", variable, step=1)


def openings(folder: Path) -> dict[str, Callable[[], None]]:
    """Return all that is opened and closed, by name; files are in this folder."""
    return {
        "independent": lambda: strategy("independent"),
        "parameter_server": lambda: strategy("parameter_server"),
        "parameter_server+staged_vars": lambda: strategy("parameter_server", staged_vars=True),
        "replicated": lambda: strategy("replicated"),
        "replicated+relaxed": lambda: strategy("replicated", variable_consistency="relaxed"),
        "area": area,
        "iterator, closed": lambda: iterator(close=True),
        "iterator, dropped": lambda: iterator(close=False),
        "files": lambda: files(folder),
    }


def measure_runs(runs: int, replicas: int) -> None:
    at_start = held()
    with md.Strategy(f"cpu*{replicas}") as strategy:
        with strategy.scope():
            variable = md.Variable([1.0] * 100, aggregation=md.VariableAggregation.MEAN)
        run(strategy, variable, max(1, runs // 100))
        before = held()
        started = time.perf_counter()
        run(strategy, variable, runs)
        seconds = time.perf_counter() - started
        after = held()
    closed = held()
    print(f"{runs} runs, {replicas} replicas, {seconds / runs * 1e6:.0f} us each")
    print(f"{'':<28}{'at start':>10}{'before':>10}{'after':>10}{'closed':>10}")
    for what in before:
        row = [each[what] for each in (at_start, before, after, closed)]
        print(f"{what:<28}" + "".join(f"{number:>10.6g}" for number in row))


def measure_openings(count: int, openings: dict[str, Callable[[], None]]) -> None:
    print(f"{count} openings and closings of each kind; what the process holds more after them")
    print(f"{'':<29}{'ms each':>8}{'threads':>9}{'files':>7}{'objects':>9}{'MB':>8}")
    for name, opening in openings.items():
        for _ in range(max(1, count // 100)):
            opening()
        before = held()
        started = time.perf_counter()
        for _ in range(count):
            opening()
        each = (time.perf_counter() - started) / count * 1e3
        after = held()
        more = [after[what] - before[what] for what in before]
        _, threads, files, objects, memory = more
        print(f"{name:<29}{each:>8.2f}{threads:>9g}{files:>7g}{objects:>9g}{memory:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--openings", type=int, default=1000, help="of each kind")
    parser.add_argument("--replicas", type=int, default=2)
    flags = parser.parse_args()
    if flags.runs:
        measure_runs(flags.runs, flags.replicas)
    if flags.openings:
        with tempfile.TemporaryDirectory() as folder:
            measure_openings(flags.openings, openings(Path(folder)))


if __name__ == "__main__":
    main()
