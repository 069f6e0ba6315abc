"""CausalAttention: each token looks at those before it."""

from __future__ import annotations

from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError
from minidist.nn.layer import Layer, count
from minidist.tensor import Tensor


class CausalAttention(Layer):
    """Attention of several heads, over a token and those before it: [n, t, 3·k] -> [n, t, k].

    It has no variables: a Dense layer before it makes the queries, keys and values of all heads,
    one behind the other, and one after it mixes what the heads found.
    """

    kind = "attention"

    def __init__(self, heads: int, *, name: str | None = None) -> None:
        super().__init__(name)
        self.heads = count(self.kind, "heads", heads)

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if len(shape) != 2 or not shape[1] or shape[1] % (3 * self.heads):
            raise ShapeError(
                f"examples must be [tokens, 3·k], where k is a multiple of the {self.heads} heads"
            )
        return shape[0], shape[1] // 3

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.causal_attention(x, self.heads)
