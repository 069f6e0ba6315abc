"""One training step, and the loop around it: a gradient's way starts here.

train_step (here) → optimizer.minimize → tape.gradient → replica.merge_call
    → variable_mgr: combine → comm.all_reduce → variable_mgr: apply → optimizer.update
    → kernels/update.h
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist import context, observe, ops
from minidist.comm.sharing import share
from minidist.dtypes import kind
from minidist.errors import NonFiniteError, ShapeError
from minidist.nn import Layer
from minidist.optim import Optimizer
from minidist.strategy import Strategy
from minidist.structure import leaf
from minidist.tensor import Tensor
from minidist.values import local_results


@leaf
@dataclass(frozen=True, slots=True)
class StepResult:
    """What one replica reports of a step: its mean loss over `count` labels, and its hits.

    An image has one label, and so has each token of a text.
    """

    loss: float
    count: int
    top_1: int = 0
    top_5: int = 0


def train_step(
    model: Layer,
    optimizer: Optimizer,
    inputs: Tensor,
    labels: Tensor,
    *,
    accuracy: bool = False,
    dtype: Any = None,
    label_smoothing: float = 0.0,
) -> StepResult:
    """Train on one replica's part of a batch: inputs [n, …], labels [n] of int64.

    Of sequences they are tokens [n, t] and labels [n, t], and the loss is the mean over all tokens.

    label_smoothing: the share of each label that is spread evenly over all classes.
    dtype: "float16" or "bfloat16" for activations and their gradients, as which the inputs enter
    the model, or leave its first layer where they are integers; None for that of the inputs.
    Variables, their gradients and the loss stay float32.

    Raises NonFiniteError, before anything is trained on it, where the loss is NaN or infinite.
    """
    results: list[StepResult] = []

    def compute_loss() -> Tensor:
        logits, flat = _by_label(_logits(model, inputs, dtype, training=True), labels)
        loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, flat, label_smoothing))
        of_step = (
            f"in step {context.frame().step}, those of a warm-up counted; nothing was trained on "
            "it. A lower learning rate or loss scale, or a look at the input's values, may help"
        )
        results.append(_result(loss, logits, flat, accuracy=accuracy, told=of_step))
        return loss

    optimizer.minimize(compute_loss, model.trainable_variables, count=labels.size)
    return results[0]


def forward_step(model: Layer, inputs: Tensor, labels: Tensor, *, dtype: Any = None) -> StepResult:
    """Compute a batch's loss and correct answers without training on it.

    Raises NonFiniteError where the loss is NaN or infinite.
    """
    with observe.span("forward", "without a tape"):
        logits, labels = _by_label(_logits(model, inputs, dtype, training=False), labels)
    loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels))
    return _result(loss, logits, labels, accuracy=True, told=_EVALUATED)


def _logits(model: Layer, inputs: Tensor, dtype: Any, *, training: bool) -> Tensor:
    """Return what a model says with activations of this dtype."""
    if dtype is not None and kind(inputs.dtype) == "f":
        inputs = ops.cast(inputs, dtype)
    with context.entered(activations=dtype):
        return model(inputs, training)


def _by_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [n, k] and labels [n]; of sequences, [n, t, k] and [n, t], all tokens'."""
    if labels.ndim == 1:
        return logits, labels
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"softmax_cross_entropy: logits {logits.shape} and labels {labels.shape} do not fit; "
            f"[n, k] and [n] do, and of sequences [n, t, k] and [n, t]"
        )
    return ops.reshape(logits, (labels.size, logits.shape[-1])), ops.reshape(labels, (labels.size,))


_EVALUATED = (
    "in an evaluation, in which nothing is trained: so the weights or the input's values are not "
    "what they should be, and a look at these, or a lower learning rate before, may help"
)


def _result(
    loss: Tensor, logits: Tensor, labels: Tensor, *, accuracy: bool, told: str
) -> StepResult:
    """Return what a replica reports; `told` is where a loss that is no number was, and the cure."""
    value = float(loss)
    if not math.isfinite(value):
        replica = context.get_replica_context()
        who = replica.replica_id if replica is not None else 0
        raise NonFiniteError(f"the loss of replica {who} is {value} {told}")
    top_1, top_5 = _correct(logits.numpy(), labels.numpy()) if accuracy else (0, 0)
    return StepResult(value, logits.shape[0], top_1, top_5)


def _correct(logits: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Count the labels that are the largest logit, and among the five largest.

    A logit that equals the label's counts as larger only where it stands before it.
    """
    if not len(logits):
        return 0, 0
    own = logits[np.arange(len(labels)), labels][:, None]
    before = np.arange(logits.shape[1]) < labels[:, None]
    rank = ((logits > own) | ((logits == own) & before)).sum(axis=1)
    return int((rank < 1).sum()), int((rank < 5).sum())


def all_results(strategy: Strategy, results: Iterable[StepResult]) -> list[StepResult]:
    """Return what the replicas of all workers report, worker by worker. All workers must ask."""
    own = list(results)
    peers = strategy.site.files  # all workers, also those that are not in step
    if peers.count == 1:
        return own
    losses = np.array([each.loss for each in own], np.float64)
    counts = np.array([(each.count, each.top_1, each.top_5) for each in own], np.int64)
    _, every = share(peers, "report on a step", [losses, counts.reshape(-1, 3)])
    return [
        StepResult(loss, *whole)
        for theirs in every
        for loss, whole in zip(theirs[0].tolist(), theirs[1].tolist(), strict=True)
    ]


def mean_loss(results: Iterable[StepResult]) -> float:
    """Return the mean loss over all labels of a global batch; 0 where there are none."""
    results = list(results)
    count = sum(result.count for result in results)
    return sum(result.loss * result.count for result in results) / count if count else 0.0


@dataclass(frozen=True)
class Accuracy:
    """The share of labels, between 0 and 1, that were guessed at once, and within five guesses."""

    top_1: float
    top_5: float
    count: int  # of labels

    @classmethod
    def of(cls, results: Iterable[StepResult]) -> Accuracy:
        """Return the accuracy over all replicas' labels; 0 where there are none."""
        results = list(results)
        count = sum(result.count for result in results)
        return cls(
            sum(result.top_1 for result in results) / max(1, count),
            sum(result.top_5 for result in results) / max(1, count),
            count,
        )


@contextmanager
def undisturbed(strategy: Strategy) -> Iterator[None]:
    """Let runs in the with statement look at a training and leave no trace in it.

    They read the variables as they are, where the policy computes with older ones, and the steps,
    which key random numbers, do not count. Where other workers change the variables meanwhile, they
    are as they are at the beginning.
    """
    servers = strategy.variable_mgr.servers
    if servers is not None and servers.apart:
        servers.pull()
    with strategy.uncounted(), context.entered(newest=True):
        yield


def evaluate(
    strategy: Strategy,
    model: Layer,
    batches: Iterable[Any],
    *,
    dtype: Any = None,
    after: Callable[[int], None] | None = None,
) -> Accuracy:
    """Return the model's accuracy over global batches of (inputs, labels), run on all replicas.

    Of several workers all must call it, with the same batches; the accuracy is that of all.
    It may be called in the middle of a training, which goes on as if it had not been. `after` is
    called after each batch with the number of its labels, in this worker.
    """
    results: list[StepResult] = []
    with undisturbed(strategy):
        for inputs, labels in strategy.distribute_dataset(batches):
            of_batch = local_results(strategy.run(forward_step, model, inputs, labels, dtype=dtype))
            results += of_batch
            if after is not None:
                after(sum(result.count for result in of_batch))
    return Accuracy.of(all_results(strategy, results))


def weights_checksums(strategy: Strategy, model: Layer) -> list[str]:
    """Return for each replica the sha256 of its trainable weights, as the last update left them.

    Of several workers all must ask, and get those of the replicas of all.
    The bytes are those of the variables in the order of their names: equal checksums, equal bits.
    """
    variables = sorted(model.trainable_variables, key=lambda variable: variable.name)

    def checksum() -> str:
        digest = hashlib.sha256()
        for variable in variables:
            digest.update(np.ascontiguousarray(variable.read().numpy()).tobytes())
        return digest.hexdigest()

    with undisturbed(strategy):
        own = list(local_results(strategy.run(checksum)))
    texts = "".join(own).encode()
    every = strategy.site.files.meet("compare the checksums of weights", texts)
    size = len(own[0])
    joined = b"".join(every).decode()
    return [joined[start : start + size] for start in range(0, len(joined), size)]


def l2_loss(variables: Iterable[Any]) -> float:
    """Return Σw²/2 over the variables that weight decay applies to, as the first copy has them."""
    total = 0.0
    for variable in variables:
        if variable.decays:
            total += float(ops.l2_loss(variable.copies[0].tensor))
    return total
