"""Profile: milliseconds by operation and by what computes it, and what lies between operations.

A step is a run of the strategy, from its begin to the next one's. It consists of the replica's
primitives (primitives.py), of its waiting for others, of the rest of its function (Python, the
tape, the meetings themselves), and of what is outside the replica: waking up, waiting for the
slowest at the end, the next batch, the program's loop. The replica that is the last to come to a
meeting does what is done there, for all; so runs inside a merge function are that replica's rest.

To choose what computes a kind of work, where it first comes, is in no step, and counted for itself.

Operations are floating-point ones, 2 for each multiplication with its addition, of convolutions and
matrix products, which are nearly all. They are held against the peak: what each replica's threads
do in registers (kernels/peak.h) while all the others do so too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from minidist import observe, threads
from minidist.errors import UsageError
from minidist.instruments.primitives import Kept, told
from minidist.kernels import peak
from minidist.strategy import Strategy

WAITS = ("wait", "turn", "peers", "await")
PLAIN = "own kernels"  # what computes where there is nothing to choose
COSTLIEST = 8  # kinds of work of which a report has a line each
BURSTS, BURST = 20, 20_000  # of the measurement of the peak, some ten microseconds each

Figures = dict[str, Any]  # an OfReplica, as JSON has it


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
    outside: float = 0.0  # of the replica's function
    waiting: float = 0.0
    choosing: float = 0.0  # in all, not in a step
    spent: list[Spent] = field(default_factory=list)
    peak: float = 0.0
    alone: float | None = None  # the primitives of one step, timed alone

    @classmethod
    def from_json(cls, figures: Mapping[str, Any]) -> OfReplica:
        """Return what `json` has made this of."""
        return cls(**{**figures, "spent": [Spent(**each) for each in figures["spent"]]})

    def json(self) -> Figures:
        """Return it as JSON has it."""
        return asdict(self)

    @property
    def computing(self) -> float:
        """All primitives."""
        return sum(each.ms for each in self.spent)

    @property
    def between(self) -> float:
        """What of the replica's function is neither a primitive nor waiting."""
        return self.step - self.outside - self.waiting - self.computing

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
        self._run: Any = None  # which is, or was, the step that goes on
        self._began = 0
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
        self._end_step()

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
        seconds = kept.alone(self._strategy)
        self._alone = {replica: 1e3 * each for replica, each in seconds.items()}

    # --- what is heard

    def posted(self, run: Any) -> None:
        if run.strategy is self._strategy and getattr(self._local, "heard", None) is None:
            self._end_step()
            self._run, self._began = run, time.perf_counter_ns()

    def started(self, run: Any, replica: int) -> None:
        self._local.belongs = run is self._run  # and is no run inside a merge function

    def begin(self, kind: str, name: str, about: dict[str, Any]) -> Any:
        local = self._local
        if kind == "replica":
            if not getattr(local, "belongs", False):
                return None
            replica = self._replicas.setdefault(about["replica"], _Heard(about["device"]))
            local.heard, local.waits, local.choices, local.choosing = replica, 0, 0, 0
            return "replica", replica, time.perf_counter_ns()
        heard: _Heard | None = getattr(local, "heard", None)
        if heard is None:
            return None
        if kind == "verb":
            local.work, local.choosing = (), 0
        elif kind == "choose":
            local.choices += 1
        elif kind in WAITS:
            local.waits += 1
        else:
            return None
        return kind, name, time.perf_counter_ns()

    def worked(self, work: Any, implementation: str) -> None:
        self._local.work = work, implementation

    def end(self, token: Any) -> None:
        if token is None:
            return
        kind, name, started = token
        ns, local = time.perf_counter_ns() - started, self._local
        heard: _Heard = local.heard
        if kind == "verb":
            heard.verb((name, *local.work), ns - local.choosing)
            heard.choosing += local.choosing
        elif kind == "replica":
            heard.inside += ns
            local.heard = None
        elif kind == "choose":
            local.choices -= 1
            if not local.choices:  # a choice within another is part of it
                local.choosing += ns
        else:
            local.waits -= 1
            if not local.waits:  # so is a wait
                heard.waiting += ns

    def _end_step(self) -> None:
        if self._run is not None:
            self._run, ns = None, time.perf_counter_ns() - self._began
            for heard in self._replicas.values():
                heard.end_step(ns)

    # --- what was heard

    def replicas(self) -> list[OfReplica]:
        """Return the figures of each replica that has run, of the steps that are over."""
        return [
            heard.figures(number, self._peaks[number], self._alone.get(number))
            for number, heard in sorted(self._replicas.items())
            if heard.steps
        ]

    def json(self) -> list[Figures]:
        """Return them as JSON has them."""
        return [each.json() for each in self.replicas()]

    def __str__(self) -> str:
        return "\n".join(lines(self.replicas()))


class _Heard:
    """What was heard of one replica, in nanoseconds."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[int] = []  # without the choosing
        self.inside = 0  # its function
        self.waiting = 0
        self.choosing = 0
        self._chosen = 0  # of that, what was chosen in steps that are over
        self._verbs: dict[tuple[Any, ...], list[int]] = {}  # calls, ns by name, work, who does it

    def verb(self, key: tuple[Any, ...], ns: int) -> None:
        count = self._verbs.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += ns

    def end_step(self, ns: int) -> None:
        self.steps.append(ns - (self.choosing - self._chosen))
        self._chosen = self.choosing

    def figures(self, number: int, peak: float, alone: float | None) -> OfReplica:
        steps = len(self.steps)
        return OfReplica(
            replica=number,
            device=self.device,
            steps=steps,
            step=mean(self.steps) / 1e6,
            median=median(self.steps) / 1e6,
            outside=(sum(self.steps) + self.choosing - self.inside) / 1e6 / steps,
            waiting=self.waiting / 1e6 / steps,
            choosing=self.choosing / 1e6,
            spent=self._spent(),
            peak=peak,
            alone=alone,
        )

    def _spent(self) -> list[Spent]:
        """Return what it has spent in a step, the costliest first."""
        steps = len(self.steps)
        found: dict[tuple[str, str, str], Spent] = {}
        for (name, *how), (calls, ns) in self._verbs.items():
            work, by = how or (None, PLAIN)
            key = name, "" if work is None else work.name, by
            each = found.setdefault(key, Spent(*key))
            each.calls += calls / steps
            each.ms += ns / 1e6 / steps
            if work is not None:
                each.gflop += work.operations * calls / 1e9 / steps
        return sorted(found.values(), key=lambda each: -each.ms)


def measured_peaks(strategy: Strategy) -> list[float]:
    """Return for each replica the GFLOP/s that its threads reach, all of all replicas at a time."""

    def replica() -> float:
        team = threads.per_replica()
        together = threading.Barrier(team)
        with ThreadPoolExecutor(team) as pool:
            return sum(pool.map(lambda _: peak_of_thread(together), range(team)))

    with strategy.uncounted():
        return list(strategy.local_results(strategy.run(replica)))


def peak_of_thread(together: threading.Barrier) -> float:
    """Return the GFLOP/s of the calling thread, which begins when all of its team have come."""
    together.wait()
    best = 0.0
    for _ in range(BURSTS):
        started = time.perf_counter()
        operations = peak.multiply_add(BURST)
        best = max(best, operations / (time.perf_counter() - started))
    return best / 1e9


# --- in words -----------------------------------------------------------------------------------


def lines(replicas: Sequence[OfReplica]) -> list[str]:
    """Return the lines of a report on some replicas."""
    if not replicas:
        return []
    return [*_table(replicas), *_costliest(replicas), *_summary(replicas)]


def _table(replicas: Sequence[OfReplica]) -> Iterator[str]:
    heads = "".join(f"{f'replica {number}':>12}" for number in range(len(replicas)))
    yield f"{'Operations, in ms of a step':<55}{'calls':>7}{heads}{'GFLOP/s':>10}{'of peak':>9}"
    for (operation, by), spents in _together(replicas, by_work=False):
        yield f"  {operation:<32} {by:<19} " + _row(spents, replicas)
    rest = {
        "between operations": [each.between for each in replicas],
        "waiting": [each.waiting for each in replicas],
        "outside the replica": [each.outside for each in replicas],
        "the step": [each.step for each in replicas],
    }
    for words, values in rest.items():
        yield f"  {words:<60}" + "".join(f"{ms:>12.3f}" for ms in values)


def _costliest(replicas: Sequence[OfReplica]) -> Iterator[str]:
    yield "The costliest kinds of work"
    works = [pair for pair in _together(replicas, by_work=True) if pair[0][0]]
    for (work, by), spents in works[:COSTLIEST]:
        yield f"  {work}"
        yield f"    {by:<51}" + _row(spents, replicas)


def _summary(replicas: Sequence[OfReplica]) -> Iterator[str]:
    if any(each.choosing for each in replicas):
        took = ", ".join(f"{each.choosing:.1f}" for each in replicas)
        yield f"To choose what computes has taken {took} ms in all, which is in no step"
    shares = ", ".join(f"{100 * each.share:.0f} %" for each in replicas)
    peaks = ", ".join(f"{each.peak:.0f}" for each in replicas)
    yield f"Share of the peak, which is {peaks} GFLOP/s: {shares}"
    timed = [(each.alone, each) for each in replicas if each.alone]
    if timed:
        alone, slow = max(timed, key=lambda pair: pair[0])
        yield (
            f"A step takes {slow.median / alone:.2f} times what its operations take alone:"
            f" {slow.median:.2f} ms (the median) and {alone:.2f} ms, in replica {slow.replica}"
        )


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
