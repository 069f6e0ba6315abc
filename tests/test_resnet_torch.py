"""resnet20 and resnet50 against PyTorch, where that is installed: losses and all gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist import context, models, ops

torch = pytest.importorskip("torch")
F = torch.nn.functional


class Net:
    """The published networks, on the weights of a model of ours."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights

    def convolution(self, x: Any, name: str, strides: int = 1) -> Any:
        kernel = self.weights[f"{name}/kernel"].permute(3, 2, 0, 1)
        return F.conv2d(x, kernel, stride=strides, padding=kernel.shape[2] // 2)

    def norm(self, x: Any, name: str) -> Any:
        scale, offset = self.weights[f"{name}/gamma"], self.weights[f"{name}/beta"]
        return F.batch_norm(x, None, None, scale, offset, training=True, eps=1e-5)

    def block(self, x: Any, number: int, strides: list[int]) -> Any:
        name = f"residual_{number}" if number else "residual"
        y = x
        for i, step in enumerate(strides):
            behind = f"_{i}" if i else ""
            y = self.convolution(y, f"{name}/conv{behind}", step)
            y = self.norm(y, f"{name}/batch_norm{behind}")
            if i + 1 < len(strides):
                y = torch.relu(y)
        if f"{name}/shortcut/conv/kernel" in self.weights:
            x = self.convolution(x, f"{name}/shortcut/conv", max(strides))
            x = self.norm(x, f"{name}/shortcut/batch_norm")
        return torch.relu(x + y)

    def resnet20(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.convolution(x, "conv"), "batch_norm"))
        for number in range(9):
            x = self.block(x, number, [2 if number in (3, 6) else 1, 1])
        return self.classes(x)

    def resnet50(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.convolution(x, "conv", 2), "batch_norm"))
        x = F.max_pool2d(x, 3, 2, 1)
        for number in range(16):
            x = self.block(x, number, [2 if number in (3, 7, 13) else 1, 1, 1])
        return self.classes(x)

    def classes(self, x: Any) -> Any:
        return x.mean((2, 3)) @ self.weights["dense/kernel"] + self.weights["dense/bias"]


@pytest.mark.parametrize(("name", "side"), [("resnet20", 16), ("resnet50", 64)])
def test_losses_and_gradients(name: str, side: int) -> None:
    context.seed(1)
    model = models.build(name, (side, side, 3), 10, dtype="float64")
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((4, side, side, 3)), rng.integers(0, 10, 4)
    ours = model.trainable_variables
    for weight in ours:
        weight.assign(weight.numpy() + 0.05 * rng.standard_normal(weight.shape))
    with md.GradientTape() as tape:
        loss = ops.reduce_mean(ops.softmax_cross_entropy(model(x, training=True), labels))
    gradients = tape.gradient(loss, ours)

    theirs = {weight.name: torch.tensor(weight.numpy(), requires_grad=True) for weight in ours}
    logits = getattr(Net(theirs), name)(torch.tensor(x.transpose(0, 3, 1, 2)))
    wanted = F.cross_entropy(logits, torch.tensor(labels))
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    for weight, gradient in zip(ours, gradients, strict=True):
        other = theirs[weight.name].grad.numpy()
        bound = 1e-9 * np.abs(other).max()
        np.testing.assert_allclose(gradient.numpy(), other, rtol=1e-7, atol=bound)
