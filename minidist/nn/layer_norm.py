"""Layer normalisation: what each token has is normalised by itself."""

from __future__ import annotations

from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError, UsageError
from minidist.initializers import ones, zeros
from minidist.nn.layer import Layer
from minidist.tensor import Tensor


class LayerNorm(Layer):
    """(x − mean)/√(variance + ε)·gamma + beta along the last axis, by the moments of each row."""

    kind = "layer_norm"

    def __init__(self, *, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name)
        if not epsilon >= 0:
            raise UsageError(f"layer_norm: the epsilon is {epsilon}; it must be at least 0")
        self.epsilon = epsilon

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if not shape:
            raise ShapeError("layer_norm: examples need a last axis to normalise along")
        self.gamma = self._variable("gamma", shape[-1:], dtype, ones())
        self.beta = self._variable("beta", shape[-1:], dtype, zeros())
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.layer_norm(x, self.gamma, self.beta, self.epsilon)
