"""How long two replicas take to sum a buffer so that both have it, beside the machine's own limit.

    python bench/all_reduce.py                                          # minidist alone
    python bench/all_reduce.py --limits ./limits --mpi MPI/bin/python   # in the same rounds

in place: a merge function hands the replicas' own arrays to a communicator, as the variable manager
does with its buckets. new: `ctx.all_reduce`, which returns new Tensors. Both are timed inside
`strategy.run`, after a meeting, in the slower replica; the sums are compared bit for bit.

--limits: a program that, called with `--workload allreduce --threads-per-replica 2`, prints a line
of JSON for each size, {"batch": KB, "step_s": seconds}: two threads in C, each of which sums half
of two buffers in place. --mpi: a Python with mpi4py and MPICH; two processes sum in place.
Figures are medians of a round's median, with the lowest and highest round; ratios are of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROUNDS = 9
STEPS = {4: 1000, 256: 1000, 4096: 200, 65536: 20}  # KB of one buffer: how often it is summed
MICROSECONDS = {4: 20.0, 256: 30.0}  # targets for in place
TIMES_LIMIT = {4096: 1.4, 65536: 1.2}
FASTER_THAN_MPI = {4096: 6.0, 65536: 4.0}
Side = dict[str, float]  # "in place 256" and the like: median microseconds


def minidist_side() -> Side:
    import minidist as md
    from minidist import comm
    from minidist.threads import cores

    def nothing(strategy: md.Strategy) -> None:
        pass

    with md.Strategy("cpu*2") as strategy:
        communicator = comm.make("auto", strategy.devices)

        def sum_rows(strategy: md.Strategy, buffers: md.PerReplica) -> None:
            rows = [[buffer.array] for buffer in strategy.local_results(buffers)]
            communicator.all_reduce(rows, rows, threads=cores())

        def in_place(buffer: md.Tensor) -> md.Tensor:
            md.get_replica_context().merge_call(sum_rows, buffer)
            return buffer

        def new(buffer: md.Tensor) -> md.Tensor:
            return md.get_replica_context().all_reduce("sum", buffer)

        def timed(how: Callable[[md.Tensor], md.Tensor], start: md.Tensor, steps: int) -> object:
            replica = md.get_replica_context()
            buffer = md.constant(start.numpy().copy())
            times = np.empty(steps)
            for i in range(steps):
                replica.merge_call(nothing)
                started = time.perf_counter()
                total = how(buffer)
                times[i] = time.perf_counter() - started
                if i == 0:
                    first = total.numpy().copy()
            return times, first

        measured = {}
        for how in (in_place, new):
            for size, steps in STEPS.items():
                random = np.random.default_rng(size)
                starts = [random.standard_normal(size * 256, np.float32) for _ in range(2)]
                given = md.PerReplica(strategy.devices, [md.constant(start) for start in starts])
                times, firsts = strategy.run(timed, how, given, steps)
                for first in firsts.values:
                    assert first.tobytes() == (starts[0] + starts[1]).tobytes()
                slower = np.maximum(*times.values)[steps // 10 :]
                measured[f"{how.__name__.replace('_', ' ')} {size}"] = (
                    float(np.median(slower)) * 1e6
                )
    return measured


def mpi_side() -> Side:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    measured = {}
    for size, steps in STEPS.items():
        buffer = np.zeros(size * 256, np.float32)
        times = np.empty(steps)
        for i in range(steps):
            world.Barrier()
            started = time.perf_counter()
            world.Allreduce(MPI.IN_PLACE, buffer)
            times[i] = time.perf_counter() - started
        world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        measured[f"mpi {size}"] = float(np.median(times[steps // 10 :])) * 1e6
    return measured if world.rank == 0 else {}


def run_limits(program: str) -> Side:
    command = [program, "--workload", "allreduce", "--threads-per-replica", "2"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {f"limit {line['batch']}": line["step_s"] * 1e6 for line in map(json.loads, lines)}


def run_side(*command: str) -> Side:
    """Run one side of this file in a process of its own (or several; one of them prints)."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def ratio(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def show(name: str, rounds: Sequence[float], unit: str, target: str = "") -> None:
    middle, low, high = statistics.median(rounds), min(rounds), max(rounds)
    print(f"{name:<40}{middle:>9.2f} {unit:<3} [{low:.2f} .. {high:.2f}]  {target}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        side = {"minidist": minidist_side, "mpi": mpi_side}[sys.argv[2]]()
        if side:
            print(json.dumps(side))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", help="the program in C")
    parser.add_argument("--mpi", help="a Python with mpi4py and MPICH")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()

    rounds: list[Side] = []
    for _ in range(options.rounds):
        rounds.append(run_side(sys.executable, __file__, "--side", "minidist"))
        if options.limits:
            rounds[-1] |= run_limits(options.limits)
        if options.mpi:
            mpiexec = str(Path(options.mpi).with_name("mpiexec"))
            command = [mpiexec, "-n", "2", options.mpi, __file__, "--side", "mpi"]
            rounds[-1] |= run_side(*command)
    columns = {name: [each[name] for each in rounds] for name in rounds[0]}
    for size in STEPS:
        own = columns[f"in place {size}"]
        target = f"target: {MICROSECONDS[size]:g}" if size in MICROSECONDS else ""
        show(f"{size} KB, in place", own, "us", target)
        show(f"{size} KB, new", columns[f"new {size}"], "us")
        if options.limits:
            limit = columns[f"limit {size}"]
            target = f"target: at most {TIMES_LIMIT[size]:g}" if size in TIMES_LIMIT else ""
            show("  two threads in C", limit, "us")
            show("    in place takes this times that", ratio(own, limit), "", target)
        if options.mpi:
            mpi = columns[f"mpi {size}"]
            faster = FASTER_THAN_MPI
            target = f"target: at least {faster[size]:g}" if size in faster else ""
            show("  two processes of MPICH", mpi, "us")
            show("    in place is faster by", ratio(mpi, own), "", target)


if __name__ == "__main__":
    main()
