"""A StagingArea on a GPU: how much of the copies from the host lies in the shadow of computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import minidist as md
from gpu_stages.tell import STANDIN, gpu, tell, trying
from minidist.device import get

STEPS = 3 if STANDIN else 40
SHAPE = (8, 8, 8, 3) if STANDIN else (64, 224, 224, 3)  # 38 MB of float32
SIDE = 16 if STANDIN else 4096  # of the matrices of a product
WANTED = 0.95


def main() -> None:
    with gpu(), trying("staging"):
        shadow()


def shadow() -> None:
    """Compare steps that only compute, only copy, and do both, a batch ahead."""
    device = get("cuda:0")
    images = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    area = md.StagingArea("float32", device=device)
    a, b = (device.ops.full((SIDE, SIDE), 1e-3, "float32") for _ in range(2))
    products = 1

    def copy() -> None:
        area.put(images)
        area.get()

    def compute() -> None:
        for _ in range(products):
            device.ops.matmul(a, b)

    def both() -> None:
        area.put(images)
        compute()
        (batch,) = area.get()
        device.ops.copy(batch.array[:1])  # so what comes next waits for it

    copying = each(copy, device.synchronize)
    if not STANDIN:  # compute twice as long as a copy takes
        products = max(1, round(2 * copying / each(compute, device.synchronize)))
    computing = each(compute, device.synchronize)
    together = each(both, device.synchronize)
    hidden = 1 - max(0.0, together - computing) / copying
    more = {"copy_ms": copying * 1e3, "compute_ms": computing * 1e3, "both_ms": together * 1e3}
    how: dict[str, Any] = {"least": WANTED, "measured": True, **more}
    tell("copies hidden by computing", round(hidden, 3), "of their time", **how)
    tell("copies to the GPU", round(images.nbytes / copying / 1e9, 1), "GB/s")


def each(step: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the seconds of a step among many."""
    for _ in range(3):
        step()
    wait()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - started) / STEPS


if __name__ == "__main__":
    main()
