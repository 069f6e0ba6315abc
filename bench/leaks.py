"""What many runs leave behind: threads, open files and memory, before and after.

    python bench/leaks.py                  # 100,000 runs full of meetings, some minutes
    python bench/leaks.py --runs=5000      # quicker

The function meets four times: an all_reduce with its gradient, a variable's assignment, a run
inside a merge function. Every hundredth run fails, in turn in a replica and in a merge function.
"Before" is after a first hundredth of the runs: by then all that is kept once has been made.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
from pathlib import Path

import minidist as md


class Planned(Exception):
    """The failure of every hundredth run."""


def held() -> dict[str, float]:
    """Return what the process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "objects that Python tracks": len(gc.get_objects()),
        "resident memory, MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    }


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


def work(strategy: md.Strategy, variable: md.Variable, runs: int) -> None:
    for number in range(runs):
        fails = "" if number % 100 else ("replica" if number % 200 else "merge function")
        try:
            strategy.run(meetings, variable, fails)
            assert not fails
        except Planned:
            assert fails


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=2)
    flags = parser.parse_args()
    at_start = held()
    with md.Strategy(f"cpu*{flags.replicas}") as strategy:
        with strategy.scope():
            variable = md.Variable([1.0] * 100, aggregation=md.VariableAggregation.MEAN)
        work(strategy, variable, max(1, flags.runs // 100))
        before = held()
        started = time.perf_counter()
        work(strategy, variable, flags.runs)
        seconds = time.perf_counter() - started
        after = held()
    closed = held()
    print(f"{flags.runs} runs, {flags.replicas} replicas, {seconds / flags.runs * 1e6:.0f} us each")
    print(f"{'':<28}{'at start':>10}{'before':>10}{'after':>10}{'closed':>10}")
    for what in before:
        row = [each[what] for each in (at_start, before, after, closed)]
        print(f"{what:<28}" + "".join(f"{number:>10.6g}" for number in row))


if __name__ == "__main__":
    main()
