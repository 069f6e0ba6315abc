"""One of each: a copy, a product, a convolution, a training on the GPU as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

import minidist as md
from gpu_stages.tell import STANDIN, gpu, tell, trying
from minidist.device import get
from minidist.train import train_step

STEPS, BATCH, SIZE = (2, 2, 8) if STANDIN else (4, 16, 28)

JOBS = [  # a model, its activations, and how far losses may be from those of the CPU
    ("mlp", "float32", 2e-3),
    ("lenet", "float32", 2e-3),
    ("lenet", "bfloat16", 5e-2),
    *([] if STANDIN else [("resnet20", "float32", 2e-2)]),
]


def main() -> None:
    rng = np.random.default_rng(0)
    with gpu():
        with trying("a copy there and back"):
            device, values = get("cuda:0"), rng.normal(size=(37, 11)).astype(np.float32)
            same = (device.copy_out(device.copy_in(values)) == values).all()
            tell("a copy there and back", "right" if same else "WRONG", good=bool(same))
        for dtype, bound in (("float32", 2e-3), ("bfloat16", 3e-2)):
            with trying(f"a product, {dtype}"):
                product(rng, dtype, bound)
        with trying("convolutions"):
            tell("convolutions are by", convolutions())
        for model, dtype, bound in JOBS:
            with trying(f"{model} learns as on the CPU, {dtype}"):
                training(rng, model, dtype, bound)


def convolutions() -> str:
    from minidist.device.cuda_dnn import cudnn

    try:
        return f"cuDNN {cudnn().backend_version()}"
    except ImportError as failure:
        return f"columns and cuBLAS, as {failure}"


def product(rng: np.random.Generator, dtype: str, bound: float) -> None:
    device = get("cuda:0")
    a, b = (rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
    with md.context.entered(device=device):
        got = md.ops.cast(
            md.ops.matmul(md.constant(a, dtype), md.constant(b, dtype)), "float32"
        ).numpy()
    error = float(np.abs(got - a @ b).max() / np.abs(a @ b).max())
    tell(f"a product, {dtype}", float(f"{error:.2g}"), "of the largest", most=bound)


def train(spec: str, model: str, data: tuple[Any, Any], dtype: str) -> list[float]:
    """Return the losses of some steps on one batch."""
    md.context.seed(1)
    with md.Strategy(spec) as strategy:
        with strategy.scope():
            net = md.models.build(model, data[0].shape[1:], 10)
        rule, losses = md.optim.Momentum(0.01), []
        for images, labels in strategy.distribute_dataset([data] * STEPS):
            result = strategy.run(train_step, net, rule, images, labels, dtype=dtype)
            losses.append(strategy.local_results(result)[0].loss)
        return losses


def training(rng: np.random.Generator, model: str, dtype: str, bound: float) -> None:
    data = rng.normal(size=(BATCH, SIZE, SIZE, 1)).astype(np.float32), rng.integers(0, 10, BATCH)
    got, want = (train(spec, model, data, dtype) for spec in ("cuda:0*1", "cpu*1"))
    error = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    name = f"{model} learns as on the CPU, {dtype}"
    tell(name, float(f"{error:.2g}"), "of the loss", most=bound)


if __name__ == "__main__":
    main()
