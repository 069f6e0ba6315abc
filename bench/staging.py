"""What a StagingArea costs, and what it hides: a copy in the shadow of a computation.

    python bench/staging.py                  # all, some seconds
    python bench/staging.py shadow           # some

Each figure is the median over rounds of a round's median, with the lowest and highest round beside
it. What is compared takes turns within one process.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
from overhead import ROUNDS, by_round, in_turns, measure, median_time, show
from threadpoolctl import threadpool_limits

import minidist as md


def tensors(count: int, elements: int) -> list[md.Tensor]:
    return [md.constant(np.ones(elements, np.float32)) for _ in range(count)]


# --- the way of an item --------------------------------------------------------------------------


def way() -> None:
    """Time the way of small tensors through an area, within a thread and to another."""
    for count, target in ((5, "target: 50"), (161, "")):
        area = md.StagingArea(["float32"] * count)
        values = tensors(count, 100)
        rounds = [median_time(partial(put_and_get, area, values), 300) * 1e6 for _ in range(ROUNDS)]
        show(f"put and get, {count} tensors of 400 bytes", rounds, "us", target)

    there, back = (md.StagingArea(["float32"] * 5, capacity=1) for _ in range(2))
    thread = threading.Thread(target=echo, args=(there, back))
    thread.start()
    values = tensors(5, 100)
    rounds = [median_time(partial(ask, there, back, values), 300) * 1e6 for _ in range(ROUNDS)]
    there.close()
    thread.join()
    show("  to another thread, and back through another area", rounds, "us")


def put_and_get(area: md.StagingArea, values: list[md.Tensor]) -> None:
    area.put(values)
    area.get()


def ask(there: md.StagingArea, back: md.StagingArea, values: list[md.Tensor]) -> None:
    there.put(values)
    back.get()


def echo(there: md.StagingArea, back: md.StagingArea) -> None:
    try:
        while True:
            back.put(there.get())
    except md.errors.ClosedError:
        pass


# --- the shadow ----------------------------------------------------------------------------------


def shadow() -> None:
    """Compare steps that copy and then compute with steps that compute what was copied before."""
    for megabytes in (4, 16, 64):
        job = Job(megabytes * 2**18)
        with threadpool_limits(1, user_api="blas"):
            job.calibrate()
            steps = {"unstaged": job.unstaged, "staged": job.staged}
            measured = in_turns(steps, turns=2 * ROUNDS, together=5)
        for name, times in measured.items():
            show(f"{megabytes} MB, and as long a computation: {name}", by_round(times, 1e3), "ms")
        ratios = [a / b for a, b in zip(*measured.values(), strict=True)]
        show("  times the unstaged rate, in %", by_round(ratios, 100), "%", "target: 170")


class Job:
    """One replica that copies a tensor and computes, as long as that takes, in its cache."""

    def __init__(self, elements: int) -> None:
        self.source = md.constant(np.ones(elements, np.float32))
        self.device = self.source.device
        self.buffer = self.device.allocate((elements,), "float32")
        self.area = md.StagingArea("float32")
        self.area.put(self.source)
        self.factor = np.ones((128, 128), np.float32)  # with its product 128 KB
        self.product = np.empty_like(self.factor)
        self.products = 1

    def copy(self) -> None:
        self.device.copy(self.buffer, self.source.array)

    def compute(self) -> None:
        for _ in range(self.products):
            np.matmul(self.factor, self.factor, out=self.product)

    def calibrate(self) -> None:
        for _ in range(5):
            step = median_time(self.compute, 20) / self.products
            self.products = round(median_time(self.copy, 20) / step)

    def unstaged(self) -> None:
        self.copy()
        self.compute()

    def staged(self) -> None:
        item = self.area.get()
        self.area.put(self.source)
        self.compute()
        del item


MEASUREMENTS = {"way": way, "shadow": shadow}


if __name__ == "__main__":
    measure(__doc__, MEASUREMENTS)
