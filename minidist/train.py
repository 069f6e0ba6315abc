"""One training step, and the loop around it: a gradient's way starts here.

train_step (here) → tape.gradient → optimizer.apply_gradients → replica.merge_call
    → variable_mgr: combine → comm.all_reduce → variable_mgr: apply → optimizer.update
    → kernels/update.h
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist import context, ops
from minidist.errors import NonFiniteError
from minidist.nn import Layer
from minidist.optim import Optimizer
from minidist.strategy import Strategy
from minidist.structure import leaf
from minidist.tape import GradientTape
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
    model: Layer, optimizer: Optimizer, images: Tensor, labels: Tensor, *, accuracy: bool = False
) -> StepResult:
    """Train on one replica's part of a batch: images [n, …], labels [n] of int64.

    Raises NonFiniteError, before anything is trained on it, where the loss is NaN or infinite.
    """
    with GradientTape() as tape:
        logits = model(images, training=True)
        loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels))
    result = _result(loss, logits, labels, accuracy=accuracy)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True), count=result.examples)
    return result


def forward_step(model: Layer, images: Tensor, labels: Tensor) -> StepResult:
    """Compute a batch's loss and correct answers without training on it."""
    logits = model(images, training=False)
    loss = ops.reduce_mean(ops.softmax_cross_entropy(logits, labels))
    return _result(loss, logits, labels, accuracy=True)


def _result(loss: Tensor, logits: Tensor, labels: Tensor, *, accuracy: bool) -> StepResult:
    value = float(loss)
    if not math.isfinite(value):
        replica = context.get_replica_context()
        who = replica.replica_id if replica is not None else 0
        raise NonFiniteError(
            f"the loss of replica {who} is {value} in step {context.frame().step}, those of a "
            "warm-up counted; nothing was trained on it. A lower learning rate or a look at the "
            "input's values may help"
        )
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


def evaluate(strategy: Strategy, model: Layer, batches: Iterable[Any]) -> Accuracy:
    """Return the model's accuracy over global batches of (images, labels), run on all replicas."""
    results: list[StepResult] = []
    for images, labels in strategy.distribute_dataset(batches):
        results += local_results(strategy.run(forward_step, model, images, labels))
    return Accuracy.of(results)


def weights_checksums(strategy: Strategy, model: Layer) -> list[str]:
    """Return for each replica the sha256 of the trainable weights it would compute with now.

    The bytes are those of the variables in the order of their names: equal checksums, equal bits.
    """
    variables = sorted(model.trainable_variables, key=lambda variable: variable.name)

    def checksum() -> str:
        digest = hashlib.sha256()
        for variable in variables:
            digest.update(np.ascontiguousarray(variable.read().numpy()).tobytes())
        return digest.hexdigest()

    return list(local_results(strategy.run(checksum)))


def l2_loss(variables: Iterable[Any]) -> float:
    """Return Σw²/2 over the variables that weight decay applies to, as the first copy has them."""
    total = 0.0
    for variable in variables:
        if variable.decays:
            total += float(ops.l2_loss(variable.copies[0].tensor))
    return total
