"""Profile: milliseconds by operation and by what computes it, and what lies between operations.

A replica's time is that of its primitives (primitives.py), of waiting for others, and the rest:
Python, the tape, the meetings themselves. The replica that is the last to come to a meeting does
what is done there, for all.

Operations are floating-point ones, 2 for each multiplication with its addition, of convolutions and
matrix products, which are nearly all. They are held against the peak: what each replica's thread
does in registers (kernels/peak.h) while all the others do so too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from minidist import observe, threads
from minidist.device import cpu_linear
from minidist.errors import UsageError
from minidist.instruments.primitives import Kept, told
from minidist.kernels import peak
from minidist.strategy import Strategy

WAITS = ("wait", "turn", "peers", "await")
PLAIN = "own kernels"  # what computes where there is nothing to choose
COSTLIEST = 8  # kinds of work of which a report has a line each
BURSTS, BURST = 20, 20_000  # of the measurement of the peak, some hundred microseconds each


@dataclass
class Spent:
    """What one kind of operation has cost a replica in a step, or did in all while it is counted.

    work: which shapes, where there was an implementation to choose for them.
    """

    operation: str
    work: str
    implementation: str
    calls: float = 0
    ms: float = 0.0
    gflop: float = 0.0


@dataclass
class OfReplica:
    """One replica's figures, in milliseconds of a step; `peak` is in GFLOP/s.

    All are means over the steps, so that they add up; beside them is the steps' median.
    """

    replica: int
    device: str
    steps: int = 0
    step: float = 0.0
    median: float = 0.0
    waiting: float = 0.0
    spent: list[Spent] = field(default_factory=list)
    peak: float = 0.0
    alone: float | None = None  # seconds of the primitives of one step, timed alone

    @property
    def computing(self) -> float:
        """All primitives."""
        return sum(each.ms for each in self.spent)

    @property
    def between(self) -> float:
        """What is neither a primitive nor waiting."""
        return self.step - self.waiting - self.computing

    @property
    def share(self) -> float:
        """What the operations of a step are of those that its time would be enough for."""
        return sum(each.gflop for each in self.spent) / (self.peak * self.step * 1e-3)


class Profile(observe.Observer):
    """Listens to all replicas of a strategy of CPU devices while a with statement lasts.

    Several with statements, one after the other, add up; the first begins with measuring the peak,
    by a run of the strategy. Raises UsageError for other devices.
    """

    def __init__(self, strategy: Strategy) -> None:
        for device in strategy.devices:
            if device.kind != "cpu":
                raise UsageError(
                    f"{device.short} is given work and does it later, so a profile of it has to "
                    "come from its maker's tools; profile a strategy of CPU devices"
                )
        self._strategy = strategy
        self._replicas: dict[int, _Heard] = {}
        self._local = threading.local()
        self._watching = ExitStack()
        self._peaks: list[float] = []
        self._alone: dict[int, float] = {}

    def __enter__(self) -> Profile:
        if not self._peaks:
            self._peaks = measured_peaks(self._strategy)
        with ExitStack() as stack:
            stack.enter_context(told())
            stack.enter_context(observe.attached(self))
            self._watching = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._watching.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hear nothing, within another with statement inside the first."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def time_alone(self, kept: Kept) -> None:
        """Time the primitives of a step, which `kept` has kept, without all that is around them."""
        self._alone = kept.alone(self._strategy)

    # --- what is heard

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> Any:
        local = self._local
        if kind == "replica":
            replica = self._replicas.setdefault(about["replica"], _Heard(about["device"]))
            local.heard, local.waits = replica, 0
            return "replica", replica, time.perf_counter_ns()
        heard: _Heard | None = getattr(local, "heard", None)
        if heard is None:
            return None
        if kind == "verb":
            local.work = None
        elif kind in WAITS:
            local.waits += 1
        else:
            return None
        return kind, name, time.perf_counter_ns()

    def worked(self, work: Any) -> None:
        self._local.work = work

    def end(self, token: Any) -> None:
        if token is None:
            return
        kind, name, started = token
        ns, local = time.perf_counter_ns() - started, self._local
        heard: _Heard = local.heard
        if kind == "verb":
            heard.verb(name, local.work, ns)
        elif kind == "replica":
            heard.steps.append(ns)
            local.heard = None
        else:
            local.waits -= 1
            if not local.waits:  # a wait within another is part of it
                heard.waiting += ns

    # --- what was heard

    def replicas(self) -> list[OfReplica]:
        """Return the figures of each replica that has run."""
        chosen = cpu_linear.used()
        return [
            OfReplica(
                number,
                heard.device,
                len(heard.steps),
                mean(heard.steps) / 1e6,
                median(heard.steps) / 1e6,
                heard.waiting / 1e6 / len(heard.steps),
                heard.spent(chosen),
                self._peaks[number],
                self._alone.get(number),
            )
            for number, heard in sorted(self._replicas.items())
            if heard.steps
        ]

    def json(self) -> list[Figures]:
        """Return them as JSON has them."""
        return [asdict(each) for each in self.replicas()]

    def __str__(self) -> str:
        return "\n".join(lines(self.json()))


class _Heard:
    """What was heard of one replica, in nanoseconds."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[int] = []
        self.waiting = 0
        self._verbs: dict[tuple[str, Any], list[int]] = {}  # calls and time, by name and work

    def verb(self, name: str, work: Any, ns: int) -> None:
        count = self._verbs.setdefault((name, work), [0, 0])
        count[0] += 1
        count[1] += ns

    def spent(self, chosen: dict[str, str]) -> list[Spent]:
        """Return what it has spent in a step; `chosen` has what does a kind of work, by name."""
        found: dict[tuple[str, str], Spent] = {}
        for (name, work), (calls, ns) in self._verbs.items():
            kind = "" if work is None else work.name
            by = PLAIN if work is None else chosen.get(kind, PLAIN)
            each = found.setdefault((name, kind), Spent(name, kind, by))
            each.calls += calls / len(self.steps)
            each.ms += ns / 1e6 / len(self.steps)
            if work is not None:
                each.gflop += work.operations * calls / 1e9 / len(self.steps)
        return sorted(found.values(), key=lambda each: -each.ms)


def measured_peaks(strategy: Strategy) -> list[float]:
    """Return for each replica the GFLOP/s that its threads can reach, all replicas at a time."""

    def replica() -> float:
        best = 0.0
        for _ in range(BURSTS):
            started = time.perf_counter()
            operations = peak.multiply_add(BURST)
            best = max(best, operations / (time.perf_counter() - started))
        return best * threads.each() / 1e9

    step = strategy.step
    try:
        return list(strategy.local_results(strategy.run(replica)))
    finally:
        strategy.step = step  # it was none


# --- in words -----------------------------------------------------------------------------------

Figures = dict[str, Any]  # an OfReplica, as JSON has it


def lines(figures: Sequence[Figures]) -> list[str]:
    """Return the lines of a report on some replicas."""
    if not figures:
        return []
    replicas = [OfReplica(**{**each, "spent": _spents(each["spent"])}) for each in figures]
    heads = "".join(f"{f'replica {number}':>12}" for number in range(len(replicas)))
    said = [f"{'Operations, in ms of a step':<46}{'calls':>7}{heads}{'GFLOP/s':>10}{'of peak':>9}"]
    for key, spents in _together(replicas, by_work=False):
        said.append(f"  {key[0]:<24}{key[1]:<20}" + _row(spents, replicas))
    for name in ("between", "waiting", "step"):
        words = {"between": "between operations", "step": "all"}.get(name, name)
        cells = "".join(f"{getattr(each, name):>12.3f}" for each in replicas)
        said.append(f"  {words:<51}{cells}")
    said.append("The costliest kinds of work")
    works = [pair for pair in _together(replicas, by_work=True) if pair[0][0]]
    for (work, by), spents in works[:COSTLIEST]:
        said += [f"  {work}", f"    {by:<42}" + _row(spents, replicas)]
    shares = ", ".join(f"{100 * each.share:.0f} %" for each in replicas)
    peaks = ", ".join(f"{each.peak:.0f}" for each in replicas)
    said.append(f"Share of the peak, which is {peaks} GFLOP/s: {shares}")
    timed = [each for each in replicas if each.alone]
    if timed:
        slow = max(timed, key=lambda each: each.alone or 0.0)
        alone = 1e3 * (slow.alone or 0.0)
        said.append(
            f"A step takes {slow.median / alone:.2f} times what its operations take alone:"
            f" {slow.median:.2f} ms (the median) and {alone:.2f} ms, in replica {slow.replica}"
        )
    return said


def _spents(found: Sequence[Any]) -> list[Spent]:
    return [Spent(**each) for each in found]


def _together(
    replicas: Sequence[OfReplica], *, by_work: bool
) -> list[tuple[tuple[str, str], list[Spent]]]:
    """Return what the replicas have spent on the same, a sum for each, the costliest first."""
    found: dict[tuple[str, str], list[Spent]] = {}
    for number, replica in enumerate(replicas):
        for each in replica.spent:
            key = (each.work if by_work else each.operation, each.implementation)
            total = found.setdefault(key, [Spent(*key, "") for _ in replicas])[number]
            total.calls += each.calls
            total.ms += each.ms
            total.gflop += each.gflop
    return sorted(found.items(), key=lambda pair: -sum(each.ms for each in pair[1]))


def _row(spents: Sequence[Spent], replicas: Sequence[OfReplica]) -> str:
    """Return the cells of a line: calls, milliseconds of each replica, and the speed of all."""
    calls = sum(each.calls for each in spents) / len(spents)
    cells = f"{calls:>7.4g}" + "".join(f"{each.ms:>12.3f}" for each in spents)
    ms, gflop = sum(each.ms for each in spents), sum(each.gflop for each in spents)
    if not gflop:
        return cells
    rate = gflop / (ms * 1e-3)
    most = sum(each.peak for each in replicas) / len(replicas)
    return f"{cells}{rate:>10.1f}{f'{100 * rate / most:.0f} %':>9}"
