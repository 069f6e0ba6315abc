"""Layer normalisation (Ba, Kiros and Hinton, 2016): each token by its own moments."""

from __future__ import annotations

from minidist.device.base import Array
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, floats
from minidist.ops.normalization import per_channel
from minidist.tape import record
from minidist.tensor import Tensor


def layer_norm(
    x: TensorLike, scale: TensorLike, offset: TensorLike, epsilon: float = 1e-5
) -> Tensor:
    """Normalise along the last axis: [..., c], [c], [c] -> [..., c].

    y = (x − mean)/√(variance + ε)·scale + offset, with mean and biased variance of each row. These
    are not kept: the way back takes them again.
    Where x is float16 or bfloat16, so is y, and scale and offset are float32.
    """
    x = floats("layer_norm", x)
    scale, offset = per_channel("layer_norm", x, scale, offset)
    if not x.shape or scale.shape != x.shape[-1:] or offset.shape != x.shape[-1:]:
        raise ShapeError(
            f"layer_norm: x {x.shape}, scale {scale.shape} and offset {offset.shape} do not fit; "
            f"[..., c], [c] and [c] do"
        )
    ops = x.device.ops

    def backward(dy: Array, _: object) -> tuple[Array, Array, Array]:
        return ops.layer_norm_backward(dy, x.array, scale.array, epsilon)

    y = ops.layer_norm(x.array, scale.array, offset.array, epsilon)
    return record(y, (x, scale, offset), backward)
