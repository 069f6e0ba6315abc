"""What the race checker costs: a step of mlp with it and without it, once it is gone again.

    python bench/check.py                     # half a minute
    python bench/check.py --devices 8 --batch 256

The two take turns in one process. Each figure is a median, with the lowest and highest block.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import minidist as md
from minidist.train import train_step

TURNS = 15
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="examples of each replica")
    flags = parser.parse_args()
    strategy = md.Strategy(f"cpu*{flags.devices}")
    with strategy.scope():
        model = md.models.build("mlp", (28, 28, 1), 10)
    optimizer = md.optim.Momentum(0.01)

    def batch() -> tuple[md.Tensor, md.Tensor]:
        generator = np.random.default_rng(0)
        images = generator.standard_normal((flags.batch, 28, 28, 1)).astype(np.float32)
        return md.constant(images), md.constant(generator.integers(0, 10, flags.batch))

    images, labels = strategy.run(batch)

    def block() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            strategy.run(train_step, model, optimizer, images, labels)
        return (time.perf_counter() - started) / STEPS * 1e3

    block()
    plain, checked = [], []
    for _ in range(TURNS):
        plain.append(block())
        with md.check():
            strategy.run(train_step, model, optimizer, images, labels)
            checked.append(block())
    strategy.close()
    for name, times in (("without", plain), ("with the checker", checked)):
        middle = statistics.median(times)
        print(f"{name:<20}{middle:>8.2f} ms a step [{min(times):.2f} .. {max(times):.2f}]")
    ratio = statistics.median(b / a for a, b in zip(plain, checked, strict=True))
    print(f"ratio               {ratio:>8.2f}    target: at most 3")


if __name__ == "__main__":
    main()
