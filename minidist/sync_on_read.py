"""SyncOnReadVariable: each replica has a value of its own; reading for all aggregates them."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidist import context
from minidist.assigning import Change, assigned, fitting, put
from minidist.comm.sharing import share
from minidist.creation import VariableAggregation
from minidist.device import Device
from minidist.dtypes import kind
from minidist.errors import UsageError
from minidist.ops.shape import at_least_float32, cast
from minidist.tape import stop_recording
from minidist.tensor import Tensor, to_device
from minidist.variable import Variable

SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN
NONE, FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA


class SyncOnReadVariable(Variable):
    """A copy with every replica, under every policy, that the replica assigns without meeting.

    In cross-replica context the copies, those of all workers, are one value, as `aggregation` says;
    so all workers must read it there, or none:

    | aggregation | read | assign(v) gives each copy | assign_add, assign_sub |
    |---|---|---|---|
    | SUM | the sum, in replica order | v/n | UsageError |
    | MEAN | the mean | v | of each copy |
    | ONLY_FIRST_REPLICA | replica 0's | v | of each copy |
    | NONE | UsageError, if n > 1 | v | of each copy |

    An integer v that n does not divide is shared out so that the sum is v. What is saved and
    restored is what is read and assigned here, so the number of replicas may change in between.
    """

    __slots__ = ()
    everywhere = True

    @staticmethod
    def check(name: str, dtype: np.dtype[Any], aggregation: VariableAggregation) -> None:
        """Raise TypeError where copies of this dtype cannot be aggregated so."""
        if kind(dtype) not in {MEAN: "f", SUM: "fiu"}.get(aggregation, kind(dtype)):
            raise TypeError(
                f"variable {name!r} is {dtype} and synchronized ON_READ, which has no "
                f"{aggregation.name}; give it a floating-point dtype, or another aggregation"
            )

    def _read_for_all(self, device: Device) -> Tensor:
        replicas = self.strategy.site.replicas
        if replicas == 1:
            return self.copies[0].tensor
        if self.aggregation is NONE:
            raise UsageError(
                f"variable {self.name!r} has {replicas} copies, each a replica's own, and "
                "is read for all replicas, but does not say what becomes of them; read it in a "
                "replica, or create it with aggregation=VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA"
            )
        tensors = self._of_all()
        first = tensors[0]
        if self.aggregation is FIRST:
            return first
        with stop_recording():
            total = at_least_float32(first)
            for tensor in tensors[1:]:
                total = total + at_least_float32(to_device(tensor, first.device))
            if self.aggregation is MEAN:
                total = total * (1 / replicas)
            return total if total.dtype == self.dtype else cast(total, self.dtype)

    def _of_all(self) -> list[Tensor]:
        """Return all replicas' values, or of ONLY_FIRST_REPLICA that of the first."""
        peers, device = self.strategy.site.peers, self.copies[0].device
        own: list[Tensor] = [copy.tensor for copy in self.copies]
        if peers.count == 1:
            return own
        if self.aggregation is FIRST:
            own = own[:1] if peers.me == 0 else []
        arrays = [tensor.numpy() for tensor in own]
        _, every = share(peers, f"read {self.name!r} for all replicas", arrays)
        return [Tensor(device.copy_in(array), device) for each in every for array in each]

    def _assign_in_replica(
        self, replica: context.ReplicaContext, change: Change, value: Any
    ) -> None:
        put([self.copies[replica.local_id]], change, value)

    def _assign_for_all(self, change: Change, value: Any) -> None:
        if self.aggregation is not SUM:
            put(self.copies, change, value)
        elif change is assigned:
            whole = fitting(self.copies[0], value).numpy()
            site = self.strategy.site
            for i, copy in enumerate(self.copies, site.first):
                put([copy], assigned, _share(whole, i, site.replicas))
        else:
            raise UsageError(
                f"variable {self.name!r} is the sum of its copies, so adding in cross-replica "
                "context could mean once or once for each replica; add in a replica, or assign"
            )


def _share(whole: np.ndarray[Any, Any], i: int, n: int) -> np.ndarray[Any, Any]:
    """Return part i of n that add up to `whole`: equal, but for the rest of integers."""
    if kind(whole.dtype) == "f":
        return np.asarray(whole / n)
    quotient, rest = np.divmod(whole, n)
    return np.asarray(quotient + (i < rest), whole.dtype)
