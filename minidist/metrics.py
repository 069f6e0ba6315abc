"""Metrics: means over everything that all replicas have seen.

A metric keeps two sums, of what is averaged and of its weights, each replica in a copy of its own;
`update` touches only that and meets nobody. `result` is the quotient of the sums over all replicas:
a ratio of sums, not a mean of ratios. The sums are float64.

Make a metric where variables are made: in the strategy's scope, or in all replicas alike. It works
in replicas and in cross-replica context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist import context, ops
from minidist.creation import VariableAggregation, VariableSynchronization, create
from minidist.errors import ShapeError
from minidist.tensor import Tensor
from minidist.values import PerReplica
from minidist.variable import Variable


class Metric:
    """A quotient of two sums over all replicas; `update`, in a subclass, says of what."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = _sum(f"{name}/total")
        self.count = _sum(f"{name}/count")

    def result(self) -> float:
        """Return total/count; 0 where nothing has been counted.

        In a replica all must call it, and outside of replicas all workers.
        """
        replica = context.get_replica_context()
        if replica is None:
            return _ratio(None, self.total, self.count)
        ratio: float = replica.merge_call(_ratio, self.total, self.count)
        return ratio

    def reset(self) -> None:
        """Forget all that was counted; in a replica, what this replica has."""
        self.total.assign(0.0)
        self.count.assign(0.0)

    def _count_in(self, values: Any, weights: Any) -> None:
        """Add to the copy that the context is about; see Mean.update."""
        x = ops.constant(values, "float64")
        if weights is None:
            total, count = ops.reduce_sum(x), ops.constant(x.size, "float64")
        else:
            w = _for_each(ops.constant(weights, "float64"), x.shape)
            total, count = ops.reduce_sum(x * w), ops.reduce_sum(w)
        self.total.assign_add(total)
        self.count.assign_add(count)

    def _in_each_replica(self, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn(*args)` for this replica, or in cross-replica context for all of them.

        There it is called for each component of PerReplica arguments; of others once, in the first
        of several workers. In one that has a single replica an argument is this replica's own.
        """
        frame = context.frame()
        strategy = self.total.strategy
        if frame.replica is not None and frame.strategy is strategy:
            fn(*args)
            return
        site = strategy.site
        differs = any(isinstance(arg, PerReplica) for arg in args)
        differs |= len(strategy.devices) == 1

        def of_one(variable: Variable, *args: Any) -> None:
            if differs or (site.first == 0 and variable.handle is variable.copies[0]):
                fn(*args)

        strategy.update(self.total, of_one, *args)


class Mean(Metric):
    """The mean of all values, in all replicas, since the last `reset`."""

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name)

    def update(self, values: Any, weights: Any = None) -> None:
        """Count in values of any shape: a Tensor, an array or a number.

        weights: of the values' shape, or one for each along the first axis, or one for all. In
        cross-replica context PerReplica values are counted in for each replica.
        Raises ShapeError where the shapes do not fit.
        """
        self._in_each_replica(self._count_in, values, weights)


class Accuracy(Metric):
    """The share of examples, in all replicas, that were predicted right since the last `reset`."""

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    def update(self, labels: Any, predictions: Any, weights: Any = None) -> None:
        """Count in examples: labels [n], and predictions [n] of classes or [n, classes] of scores.

        Of equal scores the first is the prediction. weights: one for each example, or one for all.
        Raises ShapeError where the shapes do not fit.
        """
        self._in_each_replica(self._compare, labels, predictions, weights)

    def _compare(self, labels: Any, predictions: Any, weights: Any) -> None:
        labels, predictions = ops.constant(labels), ops.constant(predictions)
        if predictions.ndim == labels.ndim + 1:
            predictions = ops.argmax(predictions, -1)
        if labels.shape != predictions.shape:
            raise ShapeError(
                f"accuracy: labels {labels.shape} and predictions {predictions.shape} do not fit; "
                "[n] and [n] or [n, classes] do"
            )
        right = ops.equal(ops.cast(labels, "int64"), ops.cast(predictions, "int64"))
        self._count_in(right, weights)


def _sum(name: str) -> Variable:
    variable: Variable = create(
        np.zeros((), np.float64),
        name=name,
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.SUM,
    )
    return variable


def _ratio(_: Any, total: Variable, count: Variable) -> float:
    divisor = float(count.read())
    return float(total.read()) / divisor if divisor else 0.0


def _for_each(weights: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return weights of a shape, from that many, one for each along the first axis, or one."""
    if weights.shape not in ((), shape[:1], shape):
        raise ShapeError(
            f"weights of shape {weights.shape} do not fit values of shape {shape}; give one for "
            "each, one for each along the first axis, or one for all"
        )
    if weights.shape != shape:
        weights = ops.reshape(weights, weights.shape + (1,) * (len(shape) - weights.ndim))
    return weights * ops.constant(np.ones(shape))
