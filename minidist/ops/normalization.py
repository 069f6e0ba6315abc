"""Batch normalisation (Ioffe and Szegedy, 2015), in training and in use."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidist.device.base import Array
from minidist.dtypes import is_narrow
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, fit, fit_device, floats
from minidist.ops.shape import cast
from minidist.tape import record
from minidist.tensor import Tensor


def batch_norm(
    x: TensorLike,
    scale: TensorLike | None,
    offset: TensorLike,
    epsilon: float = 1e-5,
    add: TensorLike | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the batch's own moments: [..., c], [c], [c] -> (y [..., c], mean, variance).

    y = (x − mean)/√(variance + ε)·scale + offset (scale None: 1), the moments [c] taken over all
    axes but the last. `add` [..., c] is added to that, and `relu` takes the ReLU of the sum, in the
    same pass. The variance is the biased one, Σ(x − mean)²/n, and is returned as such for the
    moving average, like the ancestor's layers without fusion (TensorFlow's fused kernel hands out
    the unbiased one). The moments returned carry no gradient. Of an empty batch both are 0, and so
    are all gradients. Where x is float16 or bfloat16, so is y, and scale, offset and moments are
    float32.
    """
    x, scale, offset, add = _normalized(x, scale, offset, add)
    mean, variance = x.device.ops.moments(x.array)
    return (
        _normalize(x, mean, variance, scale, offset, epsilon, True, add, relu),
        Tensor(mean, x.device),
        Tensor(variance, x.device),
    )


def batch_norm_inference(
    x: TensorLike,
    scale: TensorLike | None,
    offset: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    epsilon: float = 1e-5,
    add: TensorLike | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalise by given moments, [c] each, which carry no gradient: [..., c] -> [..., c].

    scale, add and relu do what they do in `batch_norm`.
    """
    x, scale, offset, add = _normalized(x, scale, offset, add)
    mean, variance = per_channel("batch_norm", x, mean, variance)
    if mean.shape != scale.shape or variance.shape != scale.shape:
        raise ShapeError(
            f"batch_norm: moments of shapes {mean.shape} and {variance.shape} do not fit the scale "
            f"{scale.shape}; they must be equal"
        )
    return _normalize(x, mean.array, variance.array, scale, offset, epsilon, False, add, relu)


def _normalize(
    x: Tensor,
    mean: Array,
    variance: Array,
    scale: Tensor,
    offset: Tensor,
    epsilon: float,
    moments: bool,
    add: Tensor | None,
    relu: bool,
) -> Tensor:
    """Normalise and write it down; `moments`: mean and variance are those of x itself."""
    ops = x.device.ops
    added = None if add is None else add.array
    y = ops.normalize(x.array, mean, variance, scale.array, offset.array, epsilon, added, relu)

    def backward(dy: Array, needs: Any) -> tuple[Array | None, ...]:
        result = y if relu else None
        wanted = add is not None and needs[3]
        return ops.normalize_backward(
            dy, x.array, mean, variance, scale.array, epsilon, moments, result, wanted
        )[: len(needs)]

    inputs = (x, scale, offset) if add is None else (x, scale, offset, add)
    return record(y, inputs, backward)


def _normalized(
    x: TensorLike, scale: TensorLike | None, offset: TensorLike, add: TensorLike | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x, offset = floats("batch_norm", x), floats("batch_norm", offset)
    if scale is None:
        scale = Tensor(x.device.ops.full(offset.shape, 1, offset.dtype), x.device)
    scale, offset = per_channel("batch_norm", x, scale, offset)
    if not x.shape or scale.shape != x.shape[-1:] or offset.shape != x.shape[-1:]:
        raise ShapeError(
            f"batch_norm: x {x.shape}, scale {scale.shape} and offset {offset.shape} do not fit; "
            f"[..., c], [c] and [c] do"
        )
    if add is None:
        return x, scale, offset, None
    add = floats("batch_norm", add)
    fit("batch_norm", x, add)
    if add.shape != x.shape:
        raise ShapeError(f"batch_norm: shapes {x.shape} and {add.shape} cannot be added; equal can")
    return x, scale, offset, add


def per_channel(operation: str, x: Tensor, *values: TensorLike) -> list[Tensor]:
    """Return values of each channel: in the dtype of x, or in float32 where x is narrow."""
    tensors = [floats(operation, value) for value in values]
    if not is_narrow(x.dtype):
        fit(operation, x, *tensors)
        return tensors
    for tensor in tensors:
        fit_device(operation, x, tensor)
    return [t if t.dtype == np.float32 else cast(t, "float32") for t in tensors]
