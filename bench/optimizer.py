"""One fused optimizer step over ResNet-50's 161 tensors, beside a C loop and PyTorch's fused one.

    python bench/optimizer.py                                               # minidist alone
    python bench/optimizer.py --limits ./limits --torch TORCH/bin/python    # in turns

25,557,032 parameters in float32; SGD with momentum 0.9 reads and writes 20 bytes for each, Adam 28.
What is timed is the verb that updates all tensors of a device in one call, with variables, slots
and gradients where the variable manager puts them. The sides take turns, each in a process of its
own that stays; each turn is a median of a few steps.

--limits: a program that, called with `--workload optimizer --threads-per-replica T --steps K`,
prints a line of JSON for each rule, {"variant": "sgdm" or "adam", "step_s": seconds}: the plain
loops in C over flat buffers. --torch: a Python with PyTorch, whose rules get fused=True.
Figures are medians of all turns, with the lowest and highest; ratios are of one turn each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

TURNS = 15
STEPS = 5  # in a turn
WARM_UP = 2
BYTES = {"sgdm": 20, "adam": 28}  # for each parameter
TARGETS = {"C": 0.95, "PyTorch": 1.05}
Side = dict[str, float]  # rule: median seconds of a turn


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's variables, as (output channels, input channels, …)."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            found += [(width, channels, 1, 1), (width,), (width,), (width, width, 3, 3)]
            found += [(width,), (width,), (4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                found += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*found, (1000, 2048), (1000,)]


def turn(rules: dict[str, Callable[[], object]]) -> Side:
    medians = {}
    for name, step in rules.items():
        times = []
        for _ in range(WARM_UP + STEPS):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        medians[name] = statistics.median(times[WARM_UP:])
    return medians


def minidist_rules(threads: int) -> dict[str, Callable[[], object]]:
    import numpy as np

    import minidist as md
    from minidist.comm import allocate_row

    (device,) = md.devices("cpu*1")

    def kept(value: float) -> list[np.ndarray]:
        row = [device.allocate(shape, "float32") for shape in shapes()]
        for array in row:
            array.fill(value)
        return row

    w, m, v = kept(1.0), kept(0.0), kept(1e-4)
    g = allocate_row([(device, (shape, np.dtype(np.float32))) for shape in shapes()])
    for array in g:
        array.fill(1e-3)
    how = {"scale": 1.0, "weight_decay": [0.0] * len(w), "threads": threads}
    ops = device.ops
    return {
        "sgdm": lambda: ops.momentum(w, g, m, lr=0.01, momentum=0.9, nesterov=False, **how),
        "adam": lambda: ops.adam(
            w, g, m, v, lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, step=1000, **how
        ),
    }


def torch_rules(threads: int) -> dict[str, Callable[[], object]]:
    import torch

    torch.set_num_threads(threads)
    parameters = [torch.ones(shape).requires_grad_() for shape in shapes()]
    for parameter in parameters:
        parameter.grad = torch.full(parameter.shape, 1e-3)
    sgdm = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)
    adam = torch.optim.Adam(parameters, lr=1e-3, fused=True)
    return {"sgdm": sgdm.step, "adam": adam.step}


RULES = {"minidist": minidist_rules, "PyTorch": torch_rules}


def serve(side: str, threads: int) -> None:
    """Take a turn for each line of input."""
    rules = RULES[side](threads)
    for _ in sys.stdin:
        print(json.dumps(turn(rules)), flush=True)


@contextmanager
def server(python: str, side: str, threads: int) -> Iterator[Callable[[], Side]]:
    """Start one side, and give what has it take a turn."""
    command = [python, __file__, "--serve", side, str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        requests, answers = process.stdin, process.stdout

        def take_turn() -> Side:
            requests.write("\n")
            requests.flush()
            return json.loads(answers.readline())

        yield take_turn
        requests.close()


def run_limits(program: str, threads: int) -> Side:
    command = [program, "--workload", "optimizer", "--threads-per-replica", str(threads)]
    command += ["--steps", str(STEPS), "--warmup", str(WARM_UP)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line["variant"]: line["step_s"] for line in map(json.loads, lines)}


def show(name: str, turns: Sequence[float], unit: str, target: str = "") -> None:
    middle, low, high = statistics.median(turns), min(turns), max(turns)
    print(f"{name:<40}{middle:>9.2f} {unit:<4} [{low:.2f} .. {high:.2f}]  {target}", flush=True)


def compare(threads: int, options: argparse.Namespace) -> None:
    with server(sys.executable, "minidist", threads) as own:
        sides: dict[str, Callable[[], Side]] = {"minidist": own}
        if options.limits:
            sides["C"] = lambda: run_limits(options.limits, threads)
        if not options.torch:
            report(sides, threads, options.turns)
            return
        with server(options.torch, "PyTorch", threads) as torch:
            report({**sides, "PyTorch": torch}, threads, options.turns)


def report(sides: dict[str, Callable[[], Side]], threads: int, turns: int) -> None:
    parameters = 25_557_032
    taken = [{name: take() for name, take in sides.items()} for _ in range(turns)]
    for rule, size in BYTES.items():
        for name in sides:
            times = [each[name][rule] for each in taken]
            title = f"{rule}, {threads} threads, {name}" if threads > 1 else f"{rule}, {name}"
            show(title, [seconds * 1e3 for seconds in times], "ms")
            if name == "minidist":
                show("  bytes", [size * parameters / s / 1e9 for s in times], "GB/s")
            else:
                ratios = [each[name][rule] / each["minidist"][rule] for each in taken]
                show("  minidist is faster by", ratios, "", f"target: at least {TARGETS[name]}")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", help="the program in C")
    parser.add_argument("--torch", help="a Python with PyTorch")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    for threads in (1, 2):
        compare(threads, options)


if __name__ == "__main__":
    main()
