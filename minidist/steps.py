"""Several steps in one call: `run_steps`, and what their function leaves behind for its caller.

    def step(ctx, images, labels):
        losses = strategy.run(train, images, labels)
        ctx.set_last_step_output("loss", losses, "mean")

    ctx = strategy.run_steps(step, iterator, iterations=100)
    ctx.last_step_outputs["loss"]

The function is called in cross-replica context, once for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minidist import context
from minidist.errors import EndOfDataError, MergeMismatchError, StructureError, UsageError
from minidist.input import DistributedDataset, DistributedIterator
from minidist.regrouping import line_up
from minidist.structure import map_leaves
from minidist.values import DistributedValues, PerReplica, local_results
from minidist.variable import Variable


class MultiStepContext:
    """Outputs of the steps of one `run_steps`, by name; those of the last step remain.

    Its methods work in both contexts. In a replica all replicas must call them, as they meet.
    """

    def __init__(self, last_step_outputs: dict[str, Any] | None = None) -> None:
        self._last_step_outputs = dict(last_step_outputs or {})
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """What `set_last_step_output` got: one value where it was reduced, else as it was."""
        return self._last_step_outputs

    @last_step_outputs.setter
    def last_step_outputs(self, outputs: dict[str, Any]) -> None:
        self._last_step_outputs = _named(outputs, "last_step_outputs")

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """What `set_non_tensor_output` got."""
        return self._non_tensor_outputs

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set an output of this step, reduced over the replicas with `reduce_op`.

        In cross-replica context None keeps it as it is: one value for each replica where it is
        distributed. In a replica an operation is required.
        Raises UsageError (a ValueError) where it is missing.
        """
        replica = context.get_replica_context()
        if replica is None:
            self._reduce(context.get_strategy(), name, output, reduce_op)
        elif reduce_op is None:
            raise UsageError(
                f"set_last_step_output({name!r}) was called in {context.describe()} without a "
                "reduce_op; name one ('sum' or 'mean'), or return the value from run and set it "
                "outside"
            )
        else:
            replica.merge_call(self._reduce_own, name, output, reduce_op)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set an output of any kind; in a replica, regrouped from what all replicas give."""
        replica = context.get_replica_context()
        if replica is None:
            self._keep(context.get_strategy(), name, output)
        else:
            replica.merge_call(self._keep, name, output)

    def _reduce(self, strategy: Any, name: Any, output: Any, reduce_op: Any) -> None:
        op = _same(reduce_op, "reduce_op")
        value = output if op is None else strategy.reduce(op, output)
        self._last_step_outputs[_same(name, "name")] = value

    def _reduce_own(self, strategy: Any, name: Any, output: Any, reduce_op: Any) -> None:
        """Reduce what replicas have; one object in all of them is a value of each all the same."""

        def own(leaf: Any) -> Any:
            if isinstance(leaf, (DistributedValues, Variable)):
                return leaf
            return PerReplica(strategy.devices, [leaf] * len(strategy.devices))

        self._reduce(strategy, name, map_leaves(own, output), reduce_op)

    def _keep(self, strategy: Any, name: Any, output: Any) -> None:
        self._non_tensor_outputs[_same(name, "name")] = output

    def _begin(self) -> None:
        """Forget the outputs of the step before."""
        self._last_step_outputs = {}
        self._non_tensor_outputs = {}


def run_steps(
    strategy: Any,
    fn: Callable[..., Any],
    iterator: DistributedIterator | DistributedDataset,
    iterations: int,
    initial_loop_values: dict[str, Any] | None,
) -> MultiStepContext:
    """Run `fn(ctx, *inputs)` on consecutive batches; see Strategy.run_steps."""
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise UsageError(f"iterations must be a number of steps, not {iterations!r}")
    if not isinstance(iterator, (DistributedIterator, DistributedDataset)):
        raise UsageError(
            f"run_steps takes what distribute_dataset returns, or an iterator of it, not "
            f"{iterator!r}"
        )
    if iterator.devices != strategy.devices:
        raise UsageError(
            f"run_steps of {strategy!r} got {iterator!r}, whose batches are for the replicas on "
            f"{', '.join(device.short for device in iterator.devices)}; distribute the data set "
            "with the same strategy"
        )
    initial = _named(initial_loop_values or {}, "initial_loop_values")
    ctx = MultiStepContext(initial)
    with strategy.scope():
        for step in range(iterations):
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                end = EndOfDataError(
                    f"{iterator!r} ended after {step} of the {iterations} steps; those are done, "
                    "and nothing of another has begun"
                )
                end.context = ctx
                raise end
            value = batch.get_value()
            inputs = value if type(value) is tuple else (value,)
            ctx._begin()
            fn(ctx, *inputs)
            if initial_loop_values is not None:
                _compare(initial, ctx.last_step_outputs)
    return ctx


def _named(outputs: Any, what: str) -> dict[str, Any]:
    if not isinstance(outputs, dict):
        raise UsageError(f"{what} must be a dict of outputs by name, not {outputs!r}")
    return outputs


def _same(argument: Any, what: str) -> Any:
    """Return what all replicas have given."""
    given = local_results(argument)
    if any(other != given[0] for other in given):
        raise MergeMismatchError(
            f"the replicas set one output with different {what}s: {', '.join(map(repr, given))}"
        )
    return given[0]


def _compare(initial: dict[str, Any], outputs: dict[str, Any]) -> None:
    try:
        line_up([initial, outputs])
    except StructureError as error:
        expected, found = (
            map_leaves(lambda leaf: type(leaf).__name__, values) for values in (initial, outputs)
        )
        raise StructureError(
            "initial_loop_values must have the structure of what the function sets: "
            f"{expected} is not {found}"
        ) from error
