"""Steps of ResNet-50 in bfloat16, by minidist or by PyTorch, in turns that somebody asks for.

    python -m gpu_stages.resnet minidist 256

A line of input is a turn, and a line of JSON its answer: images/s, and what else is known. Both
train alike what bench/peers/networks.py says: activations in bfloat16, weights in float32, SGD with
its momentum and weight decay, two batches that lie on the GPU and are used in turn, the loss read
at each step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np
from networks import MOMENTUM, NETWORKS, RATE

from gpu_stages.tell import STANDIN, gpu

NAME = "resnet20" if STANDIN else "resnet50"
NETWORK = NETWORKS[NAME]
SIZE = 8 if STANDIN else NETWORK.image[0]
TURN = 0.1 if STANDIN else 2.0  # seconds of steps, about

Step = Callable[[], float]  # does a step and returns its loss
Job = tuple[Step, Callable[[], None], Callable[[], dict[str, Any]]]  # a wait, and what is known


def batches(batch: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    shape = batch, SIZE, SIZE, 3
    return [
        (rng.standard_normal(shape, np.float32), rng.integers(0, NETWORK.classes, batch))
        for _ in range(2)
    ]


# --- minidist -----------------------------------------------------------------------------------


@contextmanager
def by_minidist(batch: int) -> Iterator[Job]:
    import minidist as md
    from minidist.train import train_step

    with gpu(), md.Strategy("cuda:0") as strategy:
        with strategy.scope():
            net = md.models.build(NAME, (SIZE, SIZE, 3), NETWORK.classes)
        rule = md.optim.Momentum(RATE, MOMENTUM, weight_decay=NETWORK.decay)
        given = [
            strategy.run(lambda x=x, y=y: (md.constant(x), md.constant(y)))
            for x, y in batches(batch)
        ]
        turns, (device,) = cycle(given), strategy.devices
        made: list[int] = []

        def step() -> float:
            result = strategy.run(train_step, net, rule, *next(turns), dtype="bfloat16")
            made.append(device.made)
            return strategy.local_results(result)[0].loss

        def known() -> dict[str, Any]:
            return {
                "allocations": made[-1] - made[1],
                "allocated": made[:10],
                "parameters": sum(v.size for v in net.trainable_variables),
            }

        yield step, device.synchronize, known


# --- PyTorch ------------------------------------------------------------------------------------


@contextmanager
def by_torch(batch: int) -> Iterator[Job]:
    """Use PyTorch as it is the fastest without a compiler: channels last, autocast, fused SGD."""
    import torch
    from torch_network import module

    torch.backends.cudnn.benchmark = True
    where = torch.device("cpu" if STANDIN else "cuda")
    net = module(NETWORK.layers, 3, SIZE)[0].to(where, memory_format=torch.channels_last)
    how = {"momentum": MOMENTUM, "weight_decay": NETWORK.decay, "fused": True}
    rule = torch.optim.SGD(net.parameters(), RATE, **how)
    given = [
        (
            torch.from_numpy(x).permute(0, 3, 1, 2).to(where, memory_format=torch.channels_last),
            torch.from_numpy(y).to(where),
        )
        for x, y in batches(batch)
    ]
    turns = cycle(given)

    def step() -> float:
        images, labels = next(turns)
        rule.zero_grad(set_to_none=True)
        with torch.autocast(where.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        rule.step()
        return loss.item()

    def wait() -> None:
        if where.type == "cuda":
            torch.cuda.synchronize()

    def known() -> dict[str, Any]:
        return {"parameters": sum(p.numel() for p in net.parameters()), "is": torch.__version__}

    yield step, wait, known


# --- turns --------------------------------------------------------------------------------------


def main() -> None:
    name, batch = sys.argv[1], int(sys.argv[2])
    with {"minidist": by_minidist, "torch": by_torch}[name](batch) as (step, wait, known):
        started = time.perf_counter()
        losses = [step() for _ in range(3)]
        wait()
        warm = time.perf_counter() - started
        started = time.perf_counter()
        losses.append(step())
        wait()
        steps = max(2, min(50, round(TURN / (time.perf_counter() - started))))
        answer({"warm_up_s": round(warm, 1)})
        for _ in sys.stdin:
            started = time.perf_counter()
            losses += [step() for _ in range(steps)]
            wait()
            rate = steps * batch / (time.perf_counter() - started)
            told = {"loss_first": losses[0], "loss_last": losses[-1], **known()}
            answer({"rate": round(rate, 1), "steps": steps, **told})


def answer(told: dict[str, Any]) -> None:
    print(f"ANSWER {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
