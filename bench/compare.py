"""minidist beside PyTorch, TensorFlow, JAX and MPI: the same workloads, in rounds that take turns.

    python bench/compare.py --torch T/bin/python --tensorflow F/bin/python --jax J/bin/python \\
                            --mpi M/bin/python --json compare.json --plot compare.svg
    python bench/compare.py --torch T/bin/python --only mlp,lenet --rounds 4
    python bench/compare.py --read compare.json              # the table of an earlier run

Each peer is a program in bench/peers, run by the Python that has it; who has none is left out. In
every round each peer does every workload once, the next round begins with another one. Two replicas
with one thread each, unless told otherwise.

A line has the median over rounds, the lowest and the highest, and how many times better minidist is
than the peer: the median of ratios that are of one round each, with the lowest and highest. Larger
is better for minidist, be it a rate or a time. `best` marks the peer with the best median. MB are
of peak resident memory, over all processes of a job; cores are CPU seconds in a second, of which a
job with fewer than it asks for had to share them, and its figures say little.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.job import positive

HERE = Path(__file__).parent
PEERS = ("torch", "tensorflow", "jax", "mpi")
STEPS = {  # timed, warm-up
    "mlp": (60, 10),
    "lenet": (20, 4),
    "resnet20": (15, 3),
    "resnet50": (3, 2),
    "allreduce": (20, 5),
    "optimizer": (12, 3),
    "merge_call": (10, 3),
    "input": (60, 5),
    "import": (3, 0),
}
TRAINING = ("mlp", "lenet", "resnet20", "resnet50")
LAYOUTS = ("nhwc", "nchw")  # PyTorch's, of which either may be the faster one
TARGETS = {"mlp": 1.4, "lenet": 1.15, "resnet20": 1.25, "resnet50": 1.1}
LIMITS = {  # what minidist itself may take at most
    ("import", "two replicas"): (0.4, 80.0),
    ("import", "size with dependencies"): (280.0, None),
    ("mlp", ""): (None, 200.0),
    ("resnet50", ""): (None, 1500.0),
}
LOWER_IS_BETTER = ("us", "s", "MB")

Line = dict[str, Any]  # as a peer prints it, with its round


# --- running ------------------------------------------------------------------------------------


@dataclass
class Side:
    """A peer, or minidist, and how it is started."""

    name: str
    command: list[str]
    options: dict[str, list[list[str]]] = field(default_factory=dict)  # by workload, to try all
    lacks: set[str] = field(default_factory=set)

    def measure(self, workload: str, flags: Sequence[str]) -> list[Line]:
        """Return what it says of a workload, nothing if it has not this one."""
        found = []
        for more in self.options.get(workload, [[]]):
            command = [*self.command, "--workload", workload, *flags, *more]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 2:  # as a wrong command line
                self.lacks.add(workload)
                why = done.stderr.strip().rpartition("\n")[2] or "as it says"
                print(f"{self.name} has no {workload}: {why}", file=sys.stderr, flush=True)
                return []
            if done.returncode:  # the others' rounds are not lost for it
                print(" ".join(command), "has failed:", done.stderr[-2000:], file=sys.stderr)
                continue
            lines = done.stdout.splitlines()
            found += [json.loads(line) for line in lines if line.startswith("{")]
        return found


def sides(options: argparse.Namespace) -> list[Side]:
    found = [Side("minidist", [sys.executable, str(HERE / "minidist_peer.py")])]
    for name in PEERS:
        python = getattr(options, name)
        if python:
            found.append(Side(name, [python, str(HERE / "peers" / f"{name}_peer.py")]))
            if name == "torch":
                both = [["--layout", layout] for layout in LAYOUTS]
                found[-1].options = {each: both for each in TRAINING if each != "mlp"}
    return found


def rounds(options: argparse.Namespace) -> Iterator[list[Line]]:
    """Give what all sides say in each round, side after side inside each workload."""
    every = sides(options)
    if len(every) == 1:
        flags = ", ".join(f"--{name}" for name in PEERS)
        print(f"minidist alone, for no peer is given: {flags}", file=sys.stderr, flush=True)
    how = ["--replicas", str(options.replicas), "--threads-per-replica", str(options.threads)]
    for number in range(options.rounds):
        said: list[Line] = []
        for workload in options.only:
            steps, warmup = STEPS[workload]
            flags = [*how, "--steps", str(steps), "--warmup", str(warmup)]
            for k in range(len(every)):
                side = every[(number + k) % len(every)]
                if workload not in side.lacks:
                    print(f"round {number}: {workload}, {side.name}", file=sys.stderr, flush=True)
                    lines = side.measure(workload, flags)
                    said += [{**line, "peer": side.name, "round": number} for line in lines]
        yield said


# --- what was found -----------------------------------------------------------------------------


@dataclass
class Row:
    """One side's figures in one case, by round."""

    side: str
    unit: str
    rates: dict[int, float]
    memory: float
    cores: float | None  # that it kept busy, which says whether it had them

    @property
    def counts(self) -> bool:
        """Whether it does the work, and does not only show what a call of nothing costs."""
        return not self.side.endswith("empty")

    @property
    def middle(self) -> float:
        return statistics.median(self.rates.values())


@dataclass
class Case:
    """A workload, or one size or rule of it, as each side did it."""

    workload: str
    name: str
    rows: list[Row]

    @property
    def own(self) -> Row | None:
        return next((row for row in self.rows if row.side == "minidist"), None)

    @property
    def peers(self) -> list[Row]:
        """The peers, the best first."""
        found = [row for row in self.rows if not row.side.startswith("minidist") and row.counts]
        return sorted(found, key=lambda row: row.middle, reverse=not self.lower_is_better)

    @property
    def lower_is_better(self) -> bool:
        return self.rows[0].unit in LOWER_IS_BETTER

    def ratios(self, peer: Row) -> list[float]:
        """Return how many times better minidist was in each round that both were in."""
        own = self.own
        assert own is not None
        pairs = [(own.rates[n], peer.rates[n]) for n in own.rates if n in peer.rates]
        return [b / a if self.lower_is_better else a / b for a, b in pairs]


def case_of(line: Line) -> tuple[str, str]:
    """Return which case a line is of, and the side's way to do it."""
    workload, variant = line["workload"], line["variant"]
    if workload == "allreduce":
        return f"{line['batch']} KB", variant
    if workload in ("optimizer", "merge_call"):
        what, _, way = variant.partition("-")
        return what, way
    if workload in TRAINING:
        return "", variant
    return variant, ""


def cases(lines: Sequence[Line]) -> list[Case]:
    by_case: dict[tuple[str, str], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        name, way = case_of(line)
        side = line["peer"]
        if side != "minidist" or way == "new tensors":  # who has several ways is one side for each
            side = f"{side} {way}".strip()
        by_case[line["workload"], name][side].append(line)
    return [
        Case(
            *key,
            [
                Row(
                    side,
                    of_side[0]["unit"],
                    {line["round"]: line["rate"] for line in of_side},
                    statistics.median(line["peak_rss_mb"] for line in of_side),
                    statistics.median(line["cores_used"] for line in of_side)
                    if "cores_used" in of_side[0]
                    else None,
                )
                for side, of_side in by_side.items()
            ],
        )
        for key, by_side in by_case.items()
    ]


# --- saying it ----------------------------------------------------------------------------------


def table(found: Sequence[Case]) -> Iterator[str]:
    for case in found:
        unit = case.rows[0].unit
        yield f"{case.workload} {case.name}".strip() + f", {unit}"
        own = case.own
        if own is not None:
            yield line_of(own) + "  " + wanted(case, own)
        for k, row in enumerate(case.peers):
            ratios = [] if own is None else case.ratios(row)
            text = f"  minidist ×{spread(ratios)}" if ratios else ""
            yield line_of(row) + text + ("  best" if k == 0 else "")
        yield from (line_of(row) for row in case.rows if row not in (own, *case.peers))


def line_of(row: Row) -> str:
    memory = f"{row.memory:>7.0f} MB" if row.memory else ""
    cores = "" if row.cores is None else f"{row.cores:>6.2f} cores"
    return f"  {row.side:<28}{spread([*row.rates.values()]):<32}{memory:<10}{cores:<12}"


def wanted(case: Case, own: Row) -> str:
    """Return the targets of a case, and what was reached."""
    said = []
    if case.workload in TARGETS and case.peers:
        ratio = statistics.median(case.ratios(case.peers[0]) or [0.0])
        said.append(f"×{ratio:.2f} of the best, target: at least {TARGETS[case.workload]:g}")
    most, memory = LIMITS.get((case.workload, case.name), (None, None))
    if most is not None:
        said.append(f"target: at most {most:g} {own.unit}")
    if memory is not None:
        said.append(f"target: at most {memory:g} MB")
    return ", ".join(said)


def spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.4g}"
    return f"{middle:.4g} [{min(values):.4g} .. {max(values):.4g}]"


def plot(found: Sequence[Case], file: str) -> None:
    """Draw how many times faster minidist trains than each peer, with the rounds' spread."""
    from matplotlib import pyplot

    training = [case for case in found if case.workload in TRAINING and case.own is not None]
    figure, axes = pyplot.subplots(1, max(1, len(training)), figsize=(3.2 * len(training), 3))
    for axis, case in zip(axes if len(training) > 1 else [axes], training, strict=False):
        names = []
        for k, row in enumerate(case.peers):
            ratios = case.ratios(row)
            middle = statistics.median(ratios)
            around = [[middle - min(ratios)], [max(ratios) - middle]]
            axis.barh(k, middle, xerr=around, color="#4c78a8", ecolor="#222222", height=0.6)
            names.append(row.side)
        axis.axvline(1, color="#888888", linewidth=1)
        axis.axvline(TARGETS[case.workload], color="#e45756", linewidth=1, linestyle="--")
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(case.workload, fontsize=9)
        axis.set_xlabel("minidist is faster by (dashed: target)", fontsize=7)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help="one that has it")
    parser.add_argument("--only", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--replicas", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=1, help="of each replica")
    parser.add_argument("--json", help="where all lines are written, after each round")
    parser.add_argument("--read", help="a file that --json has written: nothing is run")
    parser.add_argument("--plot", help="an image of the training workloads")
    options = parser.parse_args()
    options.only = options.only.split(",")
    for name in options.only:
        if name not in STEPS:
            parser.error(f"there is no workload {name!r}; choose from {', '.join(STEPS)}")
    for name in PEERS:
        python = getattr(options, name)
        if python and shutil.which(python) is None:
            parser.error(f"--{name}={python} is no program; it wants the Python that has {name}")
    if options.read:
        try:
            document = read(Path(options.read))
        except (OSError, ValueError) as error:
            parser.error(f"--read={options.read} cannot be read: {error}")
    else:
        document = {"machine": machine(), "command": sys.argv, "lines": []}
        for lines in rounds(options):
            document["lines"] += lines
            if options.json:
                Path(options.json).write_text(json.dumps(document, indent=1))
    found = cases(document["lines"])
    print(document["machine"])
    print("\n".join(table(found)))
    if options.plot:
        plot(found, options.plot)


def read(file: Path) -> dict[str, Any]:
    """Return what --json has written; raises OSError, and ValueError for another file."""
    document = json.loads(file.read_text())
    if not isinstance(document, dict) or not {"machine", "lines"} <= document.keys():
        raise ValueError("it is no file that --json has written")
    return document


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
