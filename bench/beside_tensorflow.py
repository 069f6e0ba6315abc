"""merge_call, run and a reduction, next to TensorFlow's MirroredStrategy on two virtual CPUs.

    python -m venv TF && TF/bin/pip install tensorflow-cpu
    python bench/beside_tensorflow.py TF/bin/python

Each side runs in a process of its own, in turns, on two replicas. TensorFlow runs eagerly, as
minidist does. A line shows the median over rounds of a round's median, and the lowest and highest
round; the ratio is TensorFlow's median by minidist's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

ROUNDS = 5
GRADIENTS = 161  # as ResNet-50 has


def median_time(call: Callable[[], object], times: int) -> float:
    measured = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured)


def measure(run: Callable[..., object], context: Callable[[], object], times: int) -> list[float]:
    """Return microseconds of: a run of an empty function; a merge_call; one with 161 objects."""

    def merging(number: int, gradients: int) -> Callable[[], None]:
        def fn() -> None:
            replica = context()
            brought = [object() for _ in range(gradients)]
            for _ in range(number):
                if gradients:
                    replica.merge_call(lambda strategy, values: None, args=(brought,))
                else:
                    replica.merge_call(lambda strategy: None)

        return fn

    empty = median_time(partial(run, lambda: None), times)
    merges = [
        (median_time(partial(run, merging(100, n)), times // 10) - empty) / 100
        for n in (0, GRADIENTS)
    ]
    return [empty * 1e6, *[seconds * 1e6 for seconds in merges]]


def minidist_side() -> list[float]:
    import minidist as md

    class Context:
        """TensorFlow's way to pass arguments, for minidist's merge_call."""

        def merge_call(self, fn, args=()):
            return md.get_replica_context().merge_call(fn, *args)

    with md.Strategy("cpu*2") as strategy:
        return measure(strategy.run, Context, 300)


def tensorflow_side() -> list[float]:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    plain = tf.autograph.experimental.do_not_convert
    return measure(lambda fn: strategy.run(plain(fn)), tf.distribute.get_replica_context, 100)


SIDES = {"minidist": minidist_side, "tensorflow": tensorflow_side}


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        print(json.dumps(SIDES[sys.argv[2]]()))
        return
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    pythons = {"minidist": sys.executable, "tensorflow": sys.argv[1]}
    rounds: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    for _ in range(ROUNDS):
        for name, python in pythons.items():
            command = [python, __file__, "--side", name]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            rounds[name].append(json.loads(result.stdout.splitlines()[-1]))
    what = ["run of an empty function", "merge_call, empty", f"merge_call of {GRADIENTS} objects"]
    for i, row in enumerate(what):
        columns = {name: [values[i] for values in rounds[name]] for name in SIDES}
        medians = {name: statistics.median(values) for name, values in columns.items()}
        cells = [
            f"{name} {medians[name]:8.1f} us [{min(values):.1f} .. {max(values):.1f}]"
            for name, values in columns.items()
        ]
        ratio = medians["tensorflow"] / medians["minidist"]
        print(f"{row:<28}{'   '.join(cells)}   ratio {ratio:.0f}")


if __name__ == "__main__":
    main()
