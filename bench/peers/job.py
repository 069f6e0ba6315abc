"""What every peer is asked for, and the line of JSON with which it answers.

    python PEER.py --workload NAME --replicas 2 --threads-per-replica 1 --steps K --warmup W

It needs nothing but the standard library, because each peer has a Python of its own.
A workload that a peer has not ends with status 2, as any wrong command line does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SUMS = {4: 50, 256: 20, 4096: 5, 65536: 1}  # KB of a buffer, and how often it is summed in a step
EXAMPLES = 50_000  # of the workload `input`
INPUT_BATCH = 128
PHOTO_BATCH, PHOTO_SIZE = 32, 224  # of the workload `jpeg`
WORKERS = (0, 1, 2)  # threads that read ahead; 0: the caller reads
PHOTOS = "--photos", {"help": "the folder of .jpg files that the workload `jpeg` reads"}
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
MERGES = 200  # in a run of the workload `merge_call`
ALONE = ("optimizer", "input", "jpeg")  # workloads of one replica
WORDS = {"sgdm": 5, "adam": 7}  # that a rule reads and writes for each parameter


@dataclass(frozen=True)
class Job:
    """What the command line asks for."""

    workload: str
    replicas: int
    threads: int  # that compute, for each replica
    batch: int  # of each replica; 0: the workload's own
    steps: int
    warmup: int
    options: dict[str, Any] = field(default_factory=dict)  # of this peer alone


def whole(text: str) -> int:
    """Read a number that may be 0; argparse says what another text is wrong with."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def positive(text: str) -> int:
    """Read a number that is at least 1."""
    number = whole(text)
    if number == 0:
        raise argparse.ArgumentTypeError("0 is too few, it must be at least 1")
    return number


def asked(
    words: str | None, workloads: Collection[str], *options: tuple[str, dict[str, Any]]
) -> Job:
    """Read the command line of a peer that has some workloads, and perhaps options of its own."""
    parser = argparse.ArgumentParser(description=(words or "").partition("\n")[0])
    parser.add_argument("--workload", required=True, choices=workloads)
    parser.add_argument("--replicas", type=positive, default=2)
    parser.add_argument("--threads-per-replica", type=positive, default=1, dest="threads")
    parser.add_argument(
        "--batch", type=whole, default=0, help="of a replica; 0: the workload's own"
    )
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--warmup", type=whole, default=5)
    for name, how in options:
        parser.add_argument(name, **how)
    found = vars(parser.parse_args())
    if found["workload"] in ALONE:
        found["replicas"] = 1
    own = ("workload", "replicas", "threads", "batch", "steps", "warmup")
    return Job(*(found.pop(name) for name in own), options=found)


def answer(
    peer: str,
    version: str,
    job: Job,
    variant: str,
    seconds: Sequence[float],
    amount: float,
    unit: str,
    *,
    memory: float | None = None,
    **more: Any,
) -> None:
    """Print a result.

    seconds: of each step. amount: what a step handles, so that the rate is amount / seconds; for
    the units "us" and "s" it is how many of what was timed there are in a step.
    memory: peak resident MiB of all processes, where it is not this process's.
    """
    ordered = sorted(seconds)
    middle = statistics.median(ordered)
    scale = {"us": 1e6, "s": 1.0}.get(unit)
    line = {
        "peer": peer,
        "version": version,
        "workload": job.workload,
        "variant": variant,
        "replicas": job.replicas,
        "threads": job.threads,
        "batch": job.batch,
        "step_s": middle,
        "p10_s": ordered[len(ordered) // 10],
        "p90_s": ordered[len(ordered) * 9 // 10],
        "rate": amount / middle if scale is None else middle * scale / amount,
        "unit": unit,
        "peak_rss_mb": round(peak_memory() if memory is None else memory, 1),
        "cpus": os.cpu_count(),
        "load1": os.getloadavg()[0],
    }
    print(json.dumps(line | more), flush=True)


def peak_memory() -> float:
    """Return the most MiB that this process has ever had resident.

    Not by `getrusage`, which counts what the parent had when it started this process.
    """
    with open("/proc/self/status") as status:
        return int(re.findall(r"VmHWM:\s+(\d+)", status.read())[0]) / 1024


@dataclass
class Measured:
    """Steps of a training: seconds of each that was timed, the first loss and the last."""

    seconds: list[float]
    losses: tuple[float, float]
    cores: float  # CPU seconds in a second

    def told(self) -> dict[str, Any]:
        """Return what a result says of it besides the rate."""
        first, last = self.losses
        return {
            "cores_used": round(self.cores, 2),
            "loss_first": round(first, 4),
            "loss_last": round(last, 4),
        }


def train(job: Job, step: Callable[[int], float]) -> Measured:
    """Do the steps of a training. `step(i)` does the i-th, to its end, and returns the loss."""
    losses, seconds = [], []
    began = used = 0.0
    for i in range(job.warmup + job.steps):
        if i == job.warmup:
            began, used = time.perf_counter(), time.process_time()
        started = time.perf_counter()
        losses.append(step(i))
        seconds.append(time.perf_counter() - started)
    cores = (time.process_time() - used) / (time.perf_counter() - began)
    return Measured(seconds[job.warmup :], (losses[0], losses[-1]), cores)


def timed(times: int, warmup: int, call: Callable[[], object]) -> list[float]:
    """Return the seconds of each call but for those of the warm-up."""
    seconds = []
    for _ in range(warmup + times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds[warmup:]


def window(job: Job, times: int, take: Callable[[], object]) -> list[float]:
    """Return the mean seconds of a batch, over a whole window: those read ahead come in bursts."""
    return busy_window(job, times, take)[0]


def busy_window(job: Job, times: int, take: Callable[[], object]) -> tuple[list[float], float]:
    """Return what `window` does, and how many CPU seconds were used in a second."""
    for _ in range(job.warmup):
        take()
    used, started = time.process_time(), time.perf_counter()
    for _ in range(times):
        take()
    seconds = time.perf_counter() - started
    return [seconds / times], (time.process_time() - used) / seconds


def photos(job: Job) -> list[bytes]:
    """Return the files of the workload `jpeg`."""
    paths = sorted(Path(job.options["photos"] or ".").glob("*.jpg"))
    if not paths:
        raise SystemExit("--photos must name a folder with .jpg files in it")
    return [path.read_bytes() for path in paths]


# --- starting -----------------------------------------------------------------------------------

_BEGIN = "import time; started = time.perf_counter()\n"
_END = """
seconds = time.perf_counter() - started
status = open("/proc/self/status").read()
print("FRESH", seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024, flush=True)
"""


def fresh(job: Job, code: str, processes: int = 1) -> tuple[list[float], float]:
    """Run some code in fresh interpreters, `job.steps` times; files come from the page cache.

    Several processes run at a time, with the name of an empty folder and their rank as arguments.
    Returns the slowest one's seconds of each time, and the median of the peak resident MiB, summed
    over the processes.
    """
    seconds, memory = [], []
    command = [sys.executable, "-c", _BEGIN + code + _END]
    for _ in range(1 + job.steps):  # the first fills the cache
        with tempfile.TemporaryDirectory() as folder:
            running = [
                subprocess.Popen([*command, folder, str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(processes)
            ]
            said = "".join(process.communicate()[0] for process in running)
        found = [line.split()[1:] for line in said.splitlines() if line.startswith("FRESH")]
        assert len(found) == processes, said
        seconds.append(max(float(each) for each, _ in found))
        memory.append(sum(float(each) for _, each in found))
    return seconds[1:], statistics.median(memory[1:])


def megabytes(*packages: str) -> float:
    """Return what installed packages take on disk, with all that they need, in 10⁶ bytes."""
    todo, sizes = list(packages), {}
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in sizes:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # needed on another platform only
            continue
        files = {os.path.realpath(file.locate()) for file in found.files or ()}
        sizes[name] = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
        needed = (each for each in found.requires or () if "extra ==" not in each)
        todo += [re.match(r"[\w.-]+", each)[0] for each in needed]
    return sum(sizes.values()) / 1e6
