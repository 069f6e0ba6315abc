"""What a meeting of replicas costs, and what steps take from CUDA after the second one."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np

import minidist as md
from gpu_stages.tell import STANDIN, gpu, tell, trying
from minidist.train import train_step

CALLS = 10 if STANDIN else 200
ROUNDS = 3 if STANDIN else 15
STEPS = 6 if STANDIN else 12
MODEL, SIZE = ("trivial", 8) if STANDIN else ("lenet", 28)
SPEC = "cuda:0*4"
WANTED = 50.0  # microseconds of an empty merge_call


def main() -> None:
    with gpu():
        with trying("merge_call"):
            merging()
        for policy in ("replicated", "parameter_server"):
            with trying(f"memory, {policy}"):
                memory(policy)


def nothing(*_: object) -> None:
    pass


def merging() -> None:
    def calls() -> float:
        replica = md.get_replica_context()
        assert replica is not None
        started = time.perf_counter()
        for _ in range(CALLS):
            replica.merge_call(nothing)
        return (time.perf_counter() - started) / CALLS

    with md.Strategy(SPEC) as strategy:
        each = [max(strategy.local_results(strategy.run(calls))) for _ in range(ROUNDS)]
    took = round(statistics.median(each) * 1e6, 1)
    tell("empty merge_call, 4 replicas", took, "µs", most=WANTED, measured=True)


def memory(policy: str) -> None:
    """Count the times that steps ask CUDA for memory, of the GPU or pinned."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, SIZE, SIZE, 1)).astype(np.float32)
    labels = rng.integers(0, 10, len(images))
    made: list[int] = []
    with md.Strategy(SPEC, policy) as strategy:
        with strategy.scope():
            net = md.models.build(MODEL, (SIZE, SIZE, 1), 10)
        rule = md.optim.Momentum(0.01)
        devices: Any = strategy.devices
        for batch in strategy.distribute_dataset([(images, labels)] * STEPS):
            strategy.run(train_step, net, rule, *batch)
            made.append(sum(device.made for device in devices))
    after = [later - earlier for earlier, later in pairwise(made[1:])]
    name = f"allocations after step 2, {policy}"
    tell(name, sum(after), f"in {STEPS - 2} steps", most=0, measured=True, by_step=after)


if __name__ == "__main__":
    main()
