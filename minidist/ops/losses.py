"""Losses, one per example; `reduce_mean` over them is 0 for an empty batch."""

from __future__ import annotations

from minidist.dtypes import kind
from minidist.errors import ShapeError, UsageError
from minidist.ops.activation import log_softmax
from minidist.ops.convert import TensorLike, as_tensor, floats
from minidist.ops.elementwise import add, multiply, negative
from minidist.ops.reductions import reduce_mean
from minidist.ops.shape import at_least_float32, cast
from minidist.tape import record
from minidist.tensor import Tensor


def softmax_cross_entropy(
    logits: TensorLike, labels: TensorLike, label_smoothing: float = 0.0
) -> Tensor:
    """−log softmax(logits)[label]: [n, k] and integer [n] -> [n].

    A share s = label_smoothing of the label is spread evenly over all classes (Szegedy et al.,
    2015): the loss is (1 − s)·loss(label) + s·(the mean of loss(j) over all classes j).
    Of float16 and bfloat16 the losses are float32.
    Raises ShapeError where the shapes do not fit, ValueError for a label outside 0 … k−1,
    UsageError for a share outside 0 … 1.
    """
    if not 0 <= label_smoothing <= 1:
        raise UsageError(
            f"softmax_cross_entropy: label_smoothing is {label_smoothing}; it must be from 0 to 1"
        )
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
    of_labels = record(
        losses, (logits,), lambda dy, _: (ops.multiply(dlogits, ops.reshape(dy, column)),)
    )
    if not label_smoothing:
        return of_labels
    of_all = negative(reduce_mean(log_softmax(logits), 1))
    return add(multiply(of_labels, 1 - label_smoothing), multiply(of_all, label_smoothing))
