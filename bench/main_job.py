"""The main job as a whole process: how long it takes, how accurate it is, the same bits twice.

    python bench/main_job.py                     # five seeds, each twice
    python bench/main_job.py --seeds=1           # quicker
    python bench/main_job.py --variable_update=parameter_server   # other flags go to the bench

Prints the median with the lowest and highest; exits with 1 if a seed's two runs differ in a bit of
any loss or weight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(seed: int, flags: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Return the seconds that a fresh process took, and its results."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "minidist.bench", f"--seed={seed}", f"--json={results}"]
        started = time.perf_counter()
        subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started, json.loads(results.read_text())


def bits(results: dict[str, Any]) -> list[Any]:
    return [[step["loss"] for step in results["steps"]], results["weights_checksum"]]


def show(name: str, values: Sequence[float], unit: str) -> None:
    print(
        f"{name:<28}{statistics.median(values):>10.2f} {unit:<9}"
        f"[{min(values):.2f} .. {max(values):.2f}]"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 1 on")
    arguments, flags = parser.parse_known_args()
    seeds = range(1, arguments.seeds + 1)
    pairs = [(run(seed, flags), run(seed, flags)) for seed in seeds]
    runs = [one for pair in pairs for one in pair]
    show("whole process", [seconds for seconds, _ in runs], "s")
    show("test accuracy", [100 * results["accuracy"]["top_1"] for _, results in runs], "%")
    show("speed", [results["images_per_sec"]["mean"] for _, results in runs], "images/s")
    show("peak memory", [results["peak_memory_bytes"] / 1e6 for _, results in runs], "MB")
    differing = [
        seed for seed, (a, b) in zip(seeds, pairs, strict=True) if bits(a[1]) != bits(b[1])
    ]
    print(f"seeds whose two runs differ:  {differing or 'none'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
