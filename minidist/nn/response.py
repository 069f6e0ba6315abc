"""LocalResponseNorm: the normalisation that came before that by batches."""

from __future__ import annotations

from minidist import ops
from minidist.nn.layer import Layer
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
        self.radius = radius
        self.bias = bias
        self.alpha = alpha
        self.beta = beta

    def _call(self, x: Tensor, training: bool) -> Tensor:
        return ops.local_response_norm(x, self.radius, self.bias, self.alpha, self.beta)
