"""Measure: time one verb in one way on buffers of one size, and check what comes out.

All processes enter each call together, outside of what is timed; the time of a call is that of the
slowest process. While timing everything is zero, so that sums in place stay what they are. The
check is on calls of its own, each with fresh data.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from minidist.comm.peers import Peers
from minidist.comm_bench.buffers import Buffers
from minidist.comm_bench.ways import Call, Way


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    seconds: of each timed call. wrong: elements that were not what they must be, over all checks
    and replicas; None without a check.
    """

    way: str
    verb: str
    dtype: str
    op: str
    in_place: bool
    nbytes: int
    count: int
    replicas: int
    bus: float
    seconds: tuple[float, ...]
    wrong: int | None

    @property
    def microseconds(self) -> dict[str, float]:
        """The median of the calls, the fastest and the slowest, and percentiles."""
        times = np.asarray(self.seconds) * 1e6
        median, p90, p99 = np.percentile(times, [50, 90, 99]).tolist()
        lowest, highest = float(times.min()), float(times.max())
        return {"median": median, "lowest": lowest, "highest": highest, "p90": p90, "p99": p99}

    @property
    def algbw(self) -> float:
        """10^9 bytes per second: the bytes of the whole by the median time."""
        return self.nbytes / self.microseconds["median"] / 1e3

    @property
    def busbw(self) -> float:
        """10^9 bytes per second that a link must have carried."""
        return self.algbw * self.bus


def measure(
    way: Way, buffers: Buffers, peers: Peers, *, iters: int, warmup_iters: int, check: int
) -> Measured | None:
    """Time `iters` calls after `warmup_iters` others, and check so many more.

    All processes must do the same in the same order. Returns None where the way has not this verb.
    """
    call = way.call(buffers)
    if call is None:
        return None
    buffers.rest()
    mine = way.run(lambda: _times(way, call, warmup_iters + iters))[warmup_iters:]
    wrong = None
    if check:
        wrong = 0
        for round_ in range(check):
            buffers.fill(round_)
            way.run(lambda: _times(way, call, 1))
            wrong += buffers.wrong(round_)
    report = np.array([*mine, wrong or 0], np.float64)
    brought = peers.meet("compare times and count what is wrong", report.tobytes())
    everyones = np.array([np.frombuffer(each, np.float64) for each in brought])
    return Measured(
        way=way.name,
        verb=buffers.verb.name,
        dtype=buffers.dtype.name,
        op=buffers.op if buffers.verb.sums else "-",
        in_place=buffers.in_place,
        nbytes=buffers.nbytes,
        count=buffers.part,
        replicas=buffers.replicas,
        bus=buffers.verb.bus(buffers.replicas),
        seconds=tuple(everyones[:, :-1].max(axis=0).tolist()),
        wrong=None if wrong is None else int(everyones[:, -1].sum()),
    )


def _times(way: Way, call: Call, calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        way.enter()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times
