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
from minidist.errors import NonFiniteError
from minidist.nn import Layer
from minidist.optim import Optimizer
from minidist.strategy import Strategy
from minidist.structure import leaf
from minidist.tensor import Tensor
from minidist.values import local_results


@leaf
@dataclass(frozen=True, slots=True)
class StepResult:
    """What one replica reports of a step: its mean loss and its number of examples."""

    loss: float
    examples: int
    top_1: int = 0
    top_5: int = 0


def train_step(
    model: Layer,
    optimizer: Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    accuracy: bool = False,
    dtype: Any = None,
) -> StepResult:
    """Train on one replica's part of a batch: images [n, …], labels [n] of int64.

    dtype: "float16" or "bfloat16" for activations and their gradients, as which the images enter
    the model; None for that of the images. Variables, their gradients and the loss stay float32.

    Raises NonFiniteError, before anything is trained on it, where the loss is NaN or infinite.
    """
    results: list[StepResult] = []

    def compute_loss() -> Tensor:
        logits = model(_entering(images, dtype), training=True)
        loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels))
        of_step = (
            f"in step {context.frame().step}, those of a warm-up counted; nothing was trained on "
            "it. A lower learning rate or loss scale, or a look at the input's values, may help"
        )
        results.append(_result(loss, logits, labels, accuracy=accuracy, told=of_step))
        return loss

    optimizer.minimize(compute_loss, model.trainable_variables, count=labels.shape[0])
    return results[0]


def forward_step(model: Layer, images: Tensor, labels: Tensor, *, dtype: Any = None) -> StepResult:
    """Compute a batch's loss and correct answers without training on it.

    Raises NonFiniteError where the loss is NaN or infinite.
    """
    with observe.span("forward", "without a tape"):
        logits = model(_entering(images, dtype), training=False)
    loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels))
    return _result(loss, logits, labels, accuracy=True, told=_EVALUATED)


def _entering(images: Tensor, dtype: Any) -> Tensor:
    return images if dtype is None else ops.cast(images, dtype)


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
    """Count the examples whose label is the largest logit, and among the five largest.

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
    counts = np.array([(each.examples, each.top_1, each.top_5) for each in own], np.int64)
    _, every = share(peers, "report on a step", [losses, counts.reshape(-1, 3)])
    return [
        StepResult(loss, *whole)
        for theirs in every
        for loss, whole in zip(theirs[0].tolist(), theirs[1].tolist(), strict=True)
    ]


def mean_loss(results: Iterable[StepResult]) -> float:
    """Return the mean loss over all examples of a global batch; 0 where there are none."""
    results = list(results)
    examples = sum(result.examples for result in results)
    return sum(result.loss * result.examples for result in results) / examples if examples else 0.0


@dataclass(frozen=True)
class Accuracy:
    """The share of examples, between 0 and 1, that were right at once, and within five guesses."""

    top_1: float
    top_5: float
    examples: int

    @classmethod
    def of(cls, results: Iterable[StepResult]) -> Accuracy:
        """Return the accuracy over all replicas' examples; 0 where there are none."""
        results = list(results)
        examples = sum(result.examples for result in results)
        return cls(
            sum(result.top_1 for result in results) / max(1, examples),
            sum(result.top_5 for result in results) / max(1, examples),
            examples,
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
    """Return the model's accuracy over global batches of (images, labels), run on all replicas.

    Of several workers all must call it, with the same batches; the accuracy is that of all.
    It may be called in the middle of a training, which goes on as if it had not been. `after` is
    called after each batch with the number of its examples, in this worker.
    """
    results: list[StepResult] = []
    with undisturbed(strategy):
        for images, labels in strategy.distribute_dataset(batches):
            of_batch = local_results(strategy.run(forward_step, model, images, labels, dtype=dtype))
            results += of_batch
            if after is not None:
                after(sum(result.examples for result in of_batch))
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
