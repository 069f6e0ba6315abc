"""Batch normalisation with moving averages."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidist import context, ops
from minidist.device.ops import Shape
from minidist.dtypes import is_narrow
from minidist.errors import ShapeError, UsageError
from minidist.initializers import ones, zeros
from minidist.nn.layer import Layer, takes_relu
from minidist.nn.moving import follow
from minidist.tensor import Tensor


class BatchNorm(Layer):
    """Normalise each channel (the last axis): by the batch in training, else by moving averages.

    The averages follow v = momentum·v + (1 − momentum)·(the batch's), variance biased, as the mean
    over replicas weighted by their counts; with moving="first" those of replica 0 alone, as in
    tf_cnn_benchmarks. Either way training needs all replicas to call the layer. scale=False leaves
    gamma out; decays=False keeps weight decay from gamma and beta. With activation="relu" the ReLU
    is taken in the same pass; activation="relu6" is another pass.
    """

    kind = "batch_norm"

    def __init__(
        self,
        *,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        scale: bool = True,
        decays: bool = True,
        moving: str = "mean",
        activation: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if moving not in ("mean", "first"):
            raise UsageError(f"batch_norm: moving={moving!r} is not known; it may be mean, first")
        self.moving = moving
        self.relu = takes_relu(self.kind, activation, ("relu", "relu6"))
        self.activation = activation
        self.scale = scale
        self.decays = decays
        self.momentum = momentum
        self.epsilon = epsilon

    def _build(self, shape: Shape, dtype: Any) -> Shape:
        if not shape:
            raise ShapeError("batch_norm: examples need a last axis to normalise along")
        size = shape[-1:]
        trained: dict[str, Any] = {"decays": self.decays}
        self.gamma = self._variable("gamma", size, dtype, ones(), **trained) if self.scale else None
        self.beta = self._variable("beta", size, dtype, zeros(), **trained)
        dtype = np.float32 if is_narrow(dtype) else dtype  # as the moments are
        self.moving_mean = self._variable("moving_mean", size, dtype, zeros(), trainable=False)
        self.moving_variance = self._variable(
            "moving_variance", size, dtype, ones(), trainable=False
        )
        return shape

    def _call(self, x: Tensor, training: bool) -> Tensor:
        y = self.normalize(x, training, None, self.activation == "relu")
        return ops.relu6(y) if self.activation == "relu6" else y

    def normalize(self, x: Tensor, training: bool, add: Tensor | None, relu: bool) -> Tensor:
        """Do what the layer is called for, then add something and take the ReLU, in one pass."""
        if not training:
            averages = self.moving_mean, self.moving_variance
            return ops.batch_norm_inference(
                x, self.gamma, self.beta, *averages, self.epsilon, add, relu
            )
        y, mean, variance = ops.batch_norm(x, self.gamma, self.beta, self.epsilon, add, relu)
        counts = self.moving == "mean" or context.frame().replica_id == 0
        news = [(self.moving_mean, mean), (self.moving_variance, variance)]
        follow(news, self.momentum, x.shape[0] if counts else 0)
        return y
