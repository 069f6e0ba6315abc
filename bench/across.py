"""Two processes on this machine, beside MPI alone, and beside two that never meet.

    python bench/across.py                          # all, some minutes
    python bench/across.py sums training phases     # some
    python bench/across.py training --peer "PyTorch=TORCH/bin/python bench/peers/torch_peer.py"
    python bench/across.py sums --peer "mpi4py=MPI/bin/python bench/peers/mpi_peer.py"

sums: all-reduce of one float32 buffer in place, by `copy`, which meets in memory that both share,
by `collective`, which is MPI's call by way of a communicator, and by MPI's call itself, all in the
same two processes (python -m minidist.comm_bench); ratios to the last are of one round.

training: a step of a model in two ranks under `collective_all_reduce`, beside two processes that
train a model each and never meet. Rounds take turns; a ratio is of one round.

phases: where the time of such a step goes, in each rank.

--peer: a name and a command, which takes its turn in every round: a program of bench/peers, or one
that has the command line and the lines of JSON of bench/peers/job.py.

It needs mpi4py and an MPI whose mpiexec lies beside this Python, or on the PATH. Figures are
medians of rounds, with the lowest and highest round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist import threads
from minidist.trace import Timeline, phases
from minidist.train import train_step

RANKS = 2
ROUNDS = 7
SIZES = {"4K": 500, "256K": 200, "4M": 50, "64M": 10}  # how often each is summed in a round
WAYS = "copy", "collective", "mpi"
TARGETS = {("copy", "4M"): 3.0, ("collective", "4M"): 0.95}
JOBS = {"mlp": 100, "lenet": 40}  # steps that are timed
BATCH = 64  # of each rank
WARM_UP = 10
SHARE = 90.0  # percent of independent processes' speed, wanted


def show(name: str, rounds: Sequence[float], unit: str, target: str = "") -> None:
    middle, low, high = statistics.median(rounds), min(rounds), max(rounds)
    print(f"{name:<46}{middle:>10.2f} {unit:<9} [{low:.2f} .. {high:.2f}]  {target}", flush=True)


def mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        sys.exit("no mpiexec beside this Python or on the PATH: pip install 'minidist[mpi]'")
    return found


def in_ranks(*arguments: str) -> str:
    """Run this Python with these arguments as two ranks; return what they print."""
    command = [mpiexec(), "-n", str(RANKS), sys.executable, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


# --- sums ---------------------------------------------------------------------------------------


def sums(options: argparse.Namespace) -> None:
    """Compare all-reduce through shared memory, and by messages, with MPI's own call."""
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(ROUNDS):
        for size, calls in SIZES.items():
            for way, microseconds in sum_times(size, calls, check=round_ == 0).items():
                times.setdefault((way, size), []).append(microseconds)
        for name, command in options.peers.items():
            for size, microseconds in peer_sums(command).items():
                times.setdefault((name, size), []).append(microseconds)
    for size in SIZES:
        for way in (way for way, found in times if found == size):
            show(f"all-reduce of {size}, {way}", times[way, size], "us")
            if way != "mpi":
                pairs = zip(times["mpi", size], times[way, size], strict=True)
                wanted = TARGETS.get((way, size))
                target = f"target: at least {wanted:g}" if wanted else ""
                show("  faster than mpi by", [mpi / own for mpi, own in pairs], "", target)


def sum_times(size: str, calls: int, check: bool) -> dict[str, float]:
    """Return the median microseconds of a call in place, for each way; perhaps check the sums."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        flags = [f"--all_reduce_spec={','.join(WAYS)}", "--verb=all_reduce", f"--json={results}"]
        flags += [f"-b={size}", f"-e={size}", f"-n={calls}", f"-c={int(check)}"]
        in_ranks("-m", "minidist.comm_bench", *flags)
        document = json.loads(results.read_text())
    assert document["wrong"] == (0 if check else None)
    return {
        line["algorithm"]: line["time_us"]["median"]
        for line in document["results"]
        if line["in_place"]
    }


def peer_sums(command: str) -> dict[str, float]:
    """Return the microseconds of the fastest variant that a peer has, by size."""
    found: dict[str, float] = {}
    for line in peer_lines(command, "allreduce", 20):
        size = f"{line['batch']}K" if line["batch"] < 1024 else f"{line['batch'] // 1024}M"
        if size in SIZES:
            found[size] = min(found.get(size, float("inf")), line["step_s"] * 1e6)
    return found


# --- training -----------------------------------------------------------------------------------


class Job:
    """A model and this process's batches, which are its own."""

    def __init__(self, name: str, policy: str) -> None:
        self.strategy = md.Strategy("cpu*1", policy)
        with self.strategy.scope():
            self.model = md.models.build(name, (28, 28, 1), 10)
        self.optimizer = md.optim.Momentum(0.01)
        generator = np.random.default_rng(self.strategy.first_replica)
        self.images = md.constant(generator.standard_normal((BATCH, 28, 28, 1)).astype("f"))
        self.labels = md.constant(generator.integers(0, 10, BATCH))

    def step(self) -> None:
        self.strategy.run(train_step, self.model, self.optimizer, self.images, self.labels)

    def rate(self, steps: int) -> float:
        """Return images per second of this process."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return BATCH * steps / (time.perf_counter() - started)


def training(options: argparse.Namespace) -> None:
    """Compare two ranks in step with two processes that never meet, and with other frameworks."""
    for model, steps in JOBS.items():
        ranks, apart, shares = [], [], []
        others: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            ranks.append(sum(ranks_rates(model, steps)))
            apart.append(sum(rates_apart(model, steps)))
            shares.append(100 * ranks[-1] / apart[-1])
            for name, command in options.peers.items():
                for line in peer_lines(command, model, steps, "--batch", str(BATCH)):
                    others.setdefault(name, []).append(line["rate"])
        show(f"{model}, two ranks", ranks, "images/s")
        show(f"{model}, two processes that never meet", apart, "images/s")
        show("  two ranks reach of that", shares, "%", f"target: {SHARE:g}")
        for name, rates in others.items():
            show(f"{model}, {name}, two replicas", rates, "images/s")
            ratios = [own / other for own, other in zip(ranks, rates, strict=True)]
            show("  two ranks are faster by", ratios, "")


def ranks_rates(model: str, steps: int) -> list[float]:
    return json.loads(in_ranks(__file__, "--side", "rank", model, str(steps)).splitlines()[-1])


def rates_apart(model: str, steps: int) -> list[float]:
    """Train in two processes at the same time: all are warm before any is timed."""
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--side", "apart", model, str(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(RANKS)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [float(process.communicate()[0]) for process in running]


def peer_lines(command: str, workload: str, steps: int, *more: str) -> list[dict[str, Any]]:
    """Return what another framework's program says, nothing if it has not this workload."""
    how = ["--workload", workload, "--replicas", str(RANKS), "--threads-per-replica", "1"]
    how += ["--steps", str(steps), "--warmup", str(WARM_UP), *more]
    done = subprocess.run([*shlex.split(command), *how], capture_output=True, text=True)
    if done.returncode == 2:
        return []
    done.check_returncode()
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rank_side(model: str, steps: str) -> None:
    cluster = md.connect()
    job = Job(model, "collective_all_reduce")
    job.rate(WARM_UP)
    rates = told(job, job.rate(int(steps)))
    if cluster.is_chief:
        print(json.dumps(rates))
    job.strategy.close()


def apart_side(model: str, steps: str) -> None:
    threads.divide(threads.allowed(), [threads.allowed()] * RANKS)  # as ranks of one machine do
    job = Job(model, "independent")
    job.rate(WARM_UP)
    print("warm", flush=True)
    sys.stdin.readline()
    print(job.rate(int(steps)))


def told(job: Job, value: Any) -> list[Any]:
    """Return what every rank tells the others, in the order of the ranks."""
    brought = job.strategy.site.peers.meet("tell", json.dumps(value).encode())
    return [json.loads(each) for each in brought]


# --- phases -------------------------------------------------------------------------------------


def print_phases(_: argparse.Namespace) -> None:
    """Print where the milliseconds of a step go, in each rank."""
    for model, steps in JOBS.items():
        print(in_ranks(__file__, "--side", "phases", model, str(steps)), end="", flush=True)


def phases_side(model: str, steps: str) -> None:
    cluster = md.connect()
    job = Job(model, "collective_all_reduce")
    timeline = Timeline()
    for k in range(WARM_UP + int(steps)):
        with timeline.attached() if k >= WARM_UP else nullcontext():
            job.step()
    found = phases(timeline.recording())
    assert found is not None
    every = told(job, {"step": found.step, **found.phases})
    if cluster.is_chief:
        print(f"{model}, ms of a step".ljust(24), *(f"{name:>9}" for name in every[0]))
        for name, row in zip(job.strategy.site.peers.names, every, strict=True):
            print(f"  {name:<22}", *(f"{ms:>9.2f}" for ms in row.values()))
    job.strategy.close()


SIDES: dict[str, Callable[[str, str], None]] = {
    "rank": rank_side,
    "apart": apart_side,
    "phases": phases_side,
}
MEASUREMENTS = {"sums": sums, "training": training, "phases": print_phases}


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        SIDES[sys.argv[2]](*sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=[*MEASUREMENTS], help=", ".join(MEASUREMENTS))
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="another framework"
    )
    options = parser.parse_args()
    for name in options.what:
        if name not in MEASUREMENTS:
            parser.error(f"there is no measurement {name!r}; choose from {', '.join(MEASUREMENTS)}")
    for peer in options.peer:
        if "=" not in peer:
            parser.error(f"--peer={peer} has no =; write NAME=COMMAND")
    options.peers = dict(peer.split("=", 1) for peer in options.peer)
    for name in options.what:
        MEASUREMENTS[name](options)


if __name__ == "__main__":
    main()
