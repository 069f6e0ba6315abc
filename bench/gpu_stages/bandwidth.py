"""Sums of several replicas and updates of weights, beside the GPU's own copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import util
from typing import Any

import numpy as np

from gpu_stages.tell import STANDIN, gpu, seconds, tell, trying
from minidist.device import Device, get

WANTED = 0.85  # of the bandwidth of a copy
REPLICAS = 4
ELEMENTS = 1 << 14 if STANDIN else 1 << 27  # of float32 in one buffer: 512 MB
PARAMETERS = ELEMENTS if STANDIN else 1 << 28  # of an update, for which Python's part is short
TENSORS = 160  # in which they lie
RESNET = ELEMENTS if STANDIN else 25_557_032


def main() -> None:
    with gpu():
        device = get("cuda:0")
        best = copy(device)
        with trying("n-way sum"):
            sums(device, best)
        with trying("updates"):
            updates(device, best)
        with trying("update of ResNet-50"):
            as_many_as_resnet(device, best)


def copy(device: Device) -> float:
    """Tell and return the bytes per second of a copy, read and written."""
    a, b = arrays(device, 2)
    took = seconds(lambda: device.copy(b, a), device.synchronize, within=0.5)
    rate = 2 * a.nbytes / took
    tell("copy on the GPU", round(rate / 1e9), "GB/s")
    return rate


def arrays(device: Device, count: int, elements: int = ELEMENTS) -> list[Any]:
    return [device.ops.full((elements,), 1e-3, "float32") for _ in range(count)]


def share(
    name: str,
    call: Callable[[], object],
    device: Device,
    nbytes: int,
    best: float,
    *,
    wanted: bool = True,
) -> None:
    """Tell the bytes per second of a call beside those of a copy."""
    rate = nbytes / seconds(call, device.synchronize, within=0.5)
    started = time.perf_counter()
    call()
    given = time.perf_counter() - started
    device.synchronize()
    least = WANTED if wanted else None
    more = {"gigabytes_per_s": round(rate / 1e9), "given_in_us": round(given * 1e6)}
    tell(name, round(rate / best, 3), "of copy", least=least, measured=True, **more)


def sums(device: Device, best: float) -> None:
    sources = [[array] for array in arrays(device, REPLICAS, ELEMENTS // 2)]
    one = [arrays(device, 1, ELEMENTS // 2)]
    nbytes = sources[0][0].nbytes
    name = f"sum of {REPLICAS} replicas"
    how: dict[str, Any] = {"scale": 1 / REPLICAS, "threads": 1}
    to_one = (REPLICAS + 1) * nbytes
    share(name, lambda: device.ops.sum(one, sources, **how), device, to_one, best)
    to_all = 2 * REPLICAS * nbytes
    share(
        f"{name}, to each",
        lambda: device.ops.sum(sources, sources, **how),
        device,
        to_all,
        best,
    )


def updates(device: Device, best: float) -> None:
    sizes = divided(PARAMETERS)
    total = 4 * sum(sizes)
    w, g, m, v = rows(device, sizes, 4)
    how: dict[str, Any] = {"scale": 1.0, "weight_decay": [1e-4] * TENSORS, "threads": 1}
    moving: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": False, **how}
    adam: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, **how}
    ops = device.ops
    share("update, momentum", lambda: ops.momentum(w, g, m, **moving), device, 5 * total, best)
    share("update, adam", lambda: ops.adam(w, g, m, v, step=9, **adam), device, 7 * total, best)
    if not STANDIN and util.find_spec("torch") is not None:
        with trying("update, adam, by PyTorch"):
            theirs = by_torch(sizes)
            took = seconds(
                lambda: ops.adam(w, g, m, v, step=9, **adam), device.synchronize, within=0.5
            )
            tell("update, adam, PyTorch's time over ours", round(theirs / took, 2))
    with trying("launches of an update"):
        from minidist.device.cuda_machine import CudaMachine

        count = launches(CudaMachine, lambda: ops.momentum(w, g, m, **moving))
        tell("launches of an update", count, f"for {TENSORS} tensors", most=1)


def as_many_as_resnet(device: Device, best: float) -> None:
    """An update that is so short that giving it takes longer: what a step of that model sees."""
    sizes = divided(RESNET)
    w, g, m = rows(device, sizes, 3)
    how: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": False, "scale": 1.0}
    share(
        "update, momentum, of ResNet-50",
        lambda: device.ops.momentum(w, g, m, weight_decay=[1e-4] * TENSORS, threads=1, **how),
        device,
        5 * 4 * sum(sizes),
        best,
        wanted=False,
    )


def divided(elements: int) -> list[int]:
    """Return the sizes of so many tensors that differ."""
    parts = np.linspace(1, 3, TENSORS)
    return [int(n) for n in parts / parts.sum() * elements]


def rows(device: Device, sizes: list[int], count: int) -> list[list[Any]]:
    return [[device.ops.full((n,), 1e-3, "float32") for n in sizes] for _ in range(count)]


def by_torch(sizes: list[int]) -> float:
    """Return the seconds of PyTorch's own update of as many tensors, in its fused way."""
    import torch

    tensors = [torch.ones(n, device="cuda", requires_grad=True) for n in sizes]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 1e-3)
    return seconds(
        torch.optim.Adam(tensors, lr=1e-3, fused=True).step, torch.cuda.synchronize, within=0.5
    )


def launches(machine: Any, call: Callable[[], object]) -> int:
    """Count the kernels that a call launches."""
    count, launch = 0, machine.launch

    def counting(*args: Any) -> None:
        nonlocal count
        count += 1
        launch(*args)

    machine.launch = counting
    try:
        call()
    finally:
        machine.launch = launch
    return count


if __name__ == "__main__":
    main()
