"""Losses, one per example; `reduce_mean` over them is 0 for an empty batch."""

from __future__ import annotations

from minidist.dtypes import kind
from minidist.errors import ShapeError
from minidist.ops.convert import TensorLike, as_tensor, floats
from minidist.ops.shape import at_least_float32, cast
from minidist.tape import record
from minidist.tensor import Tensor


def softmax_cross_entropy(logits: TensorLike, labels: TensorLike) -> Tensor:
    """−log softmax(logits)[label]: [n, k] and integer [n] -> [n].

    Of float16 and bfloat16 the losses are float32.
    Raises ShapeError where the shapes do not fit, ValueError for a label outside 0 … k−1.
    """
    logits, labels = floats("softmax_cross_entropy", logits), as_tensor(labels)
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not logits.shape[1]:
        raise ShapeError(
            f"softmax_cross_entropy: logits {logits.shape} and labels {labels.shape} do not fit; "
            f"[n, k] and [n] do"
        )
    if kind(labels.dtype) not in "iu":
        raise ShapeError(
            f"softmax_cross_entropy: labels of dtype {labels.dtype}; class numbers are integers"
        )
    logits = at_least_float32(logits)
    ops = logits.device.ops
    labels = labels if labels.dtype == "int64" else cast(labels, "int64")
    losses, dlogits = ops.softmax_cross_entropy(logits.array, labels.array)
    column = (len(losses), 1)
    return record(
        losses, (logits,), lambda dy, _: (ops.multiply(dlogits, ops.reshape(dy, column)),)
    )
