"""The transformer and its operations against PyTorch, where that is installed, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist import context, models, ops

torch = pytest.importorskip("torch")
F = torch.nn.functional
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def attention(qkv: Any, heads: int) -> Any:
    n, tokens, width = qkv.shape
    q, k, v = qkv.view(n, tokens, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(n, tokens, width // 3)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {
    "gelu": (ops.gelu, lambda x: F.gelu(x, approximate="tanh"), [3 * normal(5, 7)]),
    "layer_norm": (
        ops.layer_norm,
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
        [normal(4, 6, 10) + 2, normal(10), normal(10)],
    ),
    "causal_attention": (
        lambda qkv: ops.causal_attention(qkv, 3),
        lambda qkv: attention(qkv, 3),
        [normal(2, 37, 3 * 3 * 5)],
    ),
    "matmul": (ops.matmul, torch.matmul, [normal(2, 3, 4, 5), normal(2, 3, 5, 6)]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_and_its_gradients(name: str) -> None:
    operation, theirs, inputs = CASES[name]
    tensors = [ops.constant(x) for x in inputs]
    with md.GradientTape() as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = operation(*tensors)
        dy = normal(*y.shape)
        total = ops.reduce_sum(y * ops.constant(dy))
    wanted = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = theirs(*wanted)
    expected.backward(torch.tensor(dy))
    np.testing.assert_allclose(y.numpy(), expected.detach().numpy(), **TIGHT)
    for got, want in zip(tape.gradient(total, tensors), wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want.grad.numpy(), **TIGHT)


def transformer(ids: Any, weights: dict[str, Any]) -> Any:
    """The model as PyTorch would have it, on the weights of a model of ours."""

    def dense(x: Any, name: str) -> Any:
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    def norm(x: Any, name: str) -> Any:
        scale, offset = weights[f"{name}/gamma"], weights[f"{name}/beta"]
        return F.layer_norm(x, x.shape[-1:], scale, offset, 1e-5)

    x = F.embedding(ids, weights["embedding/table"]) + weights["positions/table"]
    for block in range(0, 8, 2):
        first = f"residual_{block}" if block else "residual"
        second = f"residual_{block + 1}"
        y = attention(dense(norm(x, f"{first}/layer_norm"), f"{first}/dense"), 4)
        x = x + dense(y, f"{first}/dense_1")
        y = F.gelu(dense(norm(x, f"{second}/layer_norm"), f"{second}/dense"), approximate="tanh")
        x = x + dense(y, f"{second}/dense_1")
    return dense(norm(x, "layer_norm"), "dense")


def test_losses_and_gradients_of_the_model() -> None:
    context.seed(1)
    model = models.build("transformer", (20,), 256, dtype="float64")
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 256, (2, 3, 20))
    ours = model.trainable_variables
    for weight in ours:
        weight.assign(weight.numpy() + 0.1 * rng.standard_normal(weight.shape))
    with md.GradientTape() as tape:
        logits = ops.reshape(model(ids, training=True), (60, 256))
        loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels.reshape(60)))
    gradients = tape.gradient(loss, ours)

    theirs = {weight.name: torch.tensor(weight.numpy(), requires_grad=True) for weight in ours}
    expected = transformer(torch.tensor(ids), theirs)
    wanted = F.cross_entropy(expected.reshape(60, 256), torch.tensor(labels.reshape(60)))
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    for weight, gradient in zip(ours, gradients, strict=True):
        want = theirs[weight.name].grad.numpy()
        np.testing.assert_allclose(gradient.numpy(), want, rtol=1e-7, atol=1e-9)
