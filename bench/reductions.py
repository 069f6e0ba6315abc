"""How long each way to sum takes, beside `copy`: what minidist/comm/auto.py was written from.

    python bench/reductions.py                       # all, about three minutes
    python bench/reductions.py --replicas=2 --specs=pscpu#4,xring

Every replica has one float32 tensor and gets the sum. Specs alternate in each round; a figure is
the median over rounds of the time in microseconds, and behind it the median over rounds of its
ratio to `copy` in the same round, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import minidist as md
from minidist import comm
from minidist.threads import cores

SPECS = "copy pscpu pscpu#4 pscpu#16 psgpu psgpu#4 xring xring#4 rechd hierarchical_copy"
SIZES = [1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 24]  # elements
REPLICAS = [2, 3, 8]
ROUNDS = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="*", default=REPLICAS)
    parser.add_argument("--specs", default=SPECS.replace(" ", ","), help="separated by commas")
    parser.add_argument("--elements", type=int, nargs="*", default=SIZES)
    options = parser.parse_args()
    specs = list(dict.fromkeys(["copy", *options.specs.split(",")]))
    for n in options.replicas:
        for elements in options.elements:
            compare(n, elements, specs)


def compare(n: int, elements: int, specs: list[str]) -> None:
    devices = md.devices(f"cpu*{n}")
    ways = {spec: comm.make(spec, devices) for spec in specs}
    sources = [[device.copy_in(np.ones(elements, np.float32))] for device in devices]
    destinations = [[device.copy_in(np.zeros(elements, np.float32))] for device in devices]
    calls = max(1, min(200, (1 << 24) // (elements * n)))
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    for _ in range(ROUNDS + 1):  # the first one leases buffers and wakes threads
        for spec, way in ways.items():
            started = time.perf_counter()
            for _ in range(calls):
                way.all_reduce(sources, destinations, threads=cores())
            times[spec].append((time.perf_counter() - started) / calls * 1e6)
    for spec in specs:
        ratios = [a / b for a, b in zip(times[spec][1:], times["copy"][1:], strict=True)]
        print(
            f"{n} replicas {elements:>9} elements  {spec:<18}"
            f"{statistics.median(times[spec][1:]):>10.1f} us "
            f"{statistics.median(ratios):>6.2f} [{min(ratios):.2f} .. {max(ratios):.2f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
