"""LocalResponseNorm: the normalisation that came before that by batches."""

from __future__ import annotations

from typing import Any

from minidist import ops
from minidist.device.ops import Shape
from minidist.errors import ShapeError
from minidist.nn.layer import Layer
from minidist.ops.response import check
from minidist.tensor import Tensor


class LocalResponseNorm(Layer):
    """x/(bias + alpha·Σ x²)^beta along the last axis; see ops.local_response_norm."""

    kind = "local_response_norm"

    def __init__(
        self,
        radius: int = 5,
        *,
        bias: float = 1.0,
        alpha: float = 1.0,
        beta: float = 0.5,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        check(radius, bias, alpha)
        self.radius = radius
        self.bias = bias
        self.alpha = alpha
        self.beta = beta

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if not shape:
            raise ShapeError("local_response_norm: examples need a last axis to normalise along")
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.local_response_norm(x, self.radius, self.bias, self.alpha, self.beta)
