"""Strategy: the public face. Devices and a policy; scope, run, reduce, update, and data sets.

    strategy = md.Strategy(md.devices("cpu*2"), variable_update="replicated")
    with strategy.scope():
        w = md.Variable(0.0, name="w")
    losses = strategy.run(step, images, labels)       # one thread for each device

With no strategy made there is still one, the default strategy: a single replica on the current
thread, for which every call here works and nothing meets.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minidist import context, reduction
from minidist.device import Device
from minidist.device import devices as parse_devices
from minidist.errors import ContextError, MergeMismatchError, UsageError
from minidist.input import DistributedDataset
from minidist.pool import Pool
from minidist.replica import Replica, Run
from minidist.threads import limit_blas, release_blas
from minidist.values import local_results, select_device_mirrored
from minidist.variable import Variable, VariableAggregation, VariableSynchronization
from minidist.variable_mgr import PolicyOptions, VariableMgr, as_array, make

REPORT_AFTER = 5.0  # seconds; decision: a missing peer is reported after this
DEADLINE = 60.0  # seconds; and is an error after this, or ten times the longest run


class Strategy:
    """Replicas on devices, and a policy for the variables they share.

    devices: names or Device objects, as `md.devices` takes them; one replica for each.
    variable_update: the name of a policy (see minidist.variable_mgr), or a VariableMgr.
    policy_options: see PolicyOptions.
    concurrent: replicas compute at the same time; False gives strict turns, replica 0 until it
        meets or returns, then replica 1 …, for debugging.
    report_after, deadline: seconds after which replicas that wait for one that does not come are
        reported, and the run fails (by default at least 60, and 10 × the longest run so far).

    A strategy is also a context manager that closes itself. Closing ends its threads.
    Raises UsageError (a ValueError) for unknown names and for devices that are named twice.
    """

    def __init__(
        self,
        devices: str | Iterable[str | Device],
        variable_update: str | VariableMgr = "replicated",
        *,
        concurrent: bool = True,
        report_after: float = REPORT_AFTER,
        deadline: float | None = None,
        **policy_options: Any,
    ) -> None:
        self.devices: tuple[Device, ...] = tuple(parse_devices(devices))
        if isinstance(variable_update, VariableMgr):
            if policy_options:
                raise UsageError(
                    f"policy options {', '.join(policy_options)} come with a policy's name, "
                    "not with a VariableMgr"
                )
            self.variable_mgr = variable_update
        else:
            self.variable_mgr = make(variable_update, self.devices, _options(policy_options))
        self.concurrent = concurrent
        self.step = 0  # runs so far; keys the random numbers of the next one
        self._report_after = report_after
        self._deadline = deadline
        self._longest = 0.0
        self._pool = Pool()
        self._limited = False

    # --- scopes

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    def scope(self) -> context.entered:
        """Return a with statement's way into this strategy's cross-replica context.

        Variables made in it belong to the strategy. Entering it again inside itself is fine.
        Raises ContextError inside another strategy's scope and inside a replica.
        """
        self._require("scope", replica="open the scope outside run")
        frame = context.frame()
        device = frame.device if frame.strategy is self else self.devices[0]
        return context.entered(strategy=self, replica=None, device=device)

    def _require(
        self, verb: str, replica: str = "call it outside run, or inside merge_call"
    ) -> None:
        """Check that this thread may act for all replicas of this strategy."""
        frame = context.frame()
        if not context.has_strategy():
            return
        if frame.strategy is not self:
            raise ContextError(
                f"Mixing different Strategy objects: {verb} of {self!r} was called in "
                f"{context.describe(frame)}; leave that strategy first"
            )
        if frame.replica is not None:
            raise ContextError(f"{verb} was called in {context.describe(frame)}; {replica}")

    # --- running

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn` once for each replica, each on its own thread, and regroup what they return.

        Of PerReplica and Mirrored values in the arguments each replica gets its own component;
        everything else is passed as it is. See minidist.replica for how a run ends.

        Raises ContextError inside a replica or under another strategy; what `fn` raises; see
        MergeMismatchError, HangError, StructureError.
        """
        self._require(
            "run", replica="use merge_call to act for all replicas, and run inside its function"
        )
        if not self._limited and not self._pool.closed:
            limit_blas(self, self.num_replicas)
            self._limited = True
        self.step += 1
        started = time.monotonic()
        deadline = max(DEADLINE, 10 * self._longest) if self._deadline is None else self._deadline
        result = Run(
            self,
            self.devices,
            fn,
            args,
            kwargs,
            step=self.step,
            concurrent=self.concurrent,
            report_after=self._report_after,
            deadline=deadline,
        )(self._pool)
        self._longest = max(self._longest, time.monotonic() - started)
        return result

    def close(self) -> None:
        """End the replicas' threads and give BLAS its threads back. Closing twice is fine."""
        self._pool.close()
        release_blas(self)
        self._limited = False

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- for all replicas at once

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Return the sum or mean over the replicas of each leaf of a structure, in replica order.

        op: "sum" or "mean". axis: also reduce each component over this axis first; a mean then
        divides by the true number of elements over all replicas. The result is one Tensor on the
        first replica's device (a Python number for numbers). A mean is floating point, also of
        integers. A leaf that is not distributed is its own mean; its sum is only defined for 0
        and for one replica.
        Raises UsageError (a ValueError) for what cannot be reduced, ShapeError where the replicas'
        shapes or dtypes differ.
        """
        self._require("reduce")
        return reduction.reduce(op, value, axis, self.num_replicas)

    def update(self, variable: Variable, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `fn(variable, *args, **kwargs)` for each copy, in an update context on its device.

        Reads and assigns inside are of that copy. Mirrored arguments are split by device.
        Raises UsageError (a ValueError) for what is no variable of this strategy, and TypeError for
        a PerReplica argument.
        """
        self._require("update")
        if not isinstance(variable, Variable) or variable.strategy is not self:
            raise UsageError(f"update takes a variable of {self!r}, not {variable!r}")
        for copy in variable.copies:
            with context.entered(
                strategy=self, replica=None, device=copy.device, update_device=copy.device
            ):
                fn(
                    variable,
                    *select_device_mirrored(copy.device, args),
                    **select_device_mirrored(copy.device, kwargs),
                )

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a value's components in replica order, or a tuple of a value that has none."""
        return local_results(value)

    def distribute_dataset(self, batches: Iterable[Any]) -> DistributedDataset:
        """Split each global batch over the replicas; see minidist.input."""
        return DistributedDataset(batches, self.devices)

    # --- variables

    def create_variable(
        self,
        *,
        initial_value: Any,
        name: str,
        dtype: Any,
        trainable: bool,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        decays: bool,
    ) -> Variable:
        """Make a variable the way the policy wants it; `md.Variable` ends here.

        In a replica all replicas meet: they must make the same one.
        """
        spec = {
            "name": name,
            "dtype": dtype,
            "trainable": trainable,
            "synchronization": synchronization,
            "aggregation": aggregation,
            "decays": decays,
        }
        initial = initial_value if callable(initial_value) else lambda: initial_value
        replica = context.get_replica_context()
        if isinstance(replica, Replica):
            value = as_array(initial(), dtype)
            result: Variable = replica.merge_call(_create, _Spec(value, spec))
            return result
        return self.variable_mgr.create(self, [initial] * self.num_replicas, **spec)

    def __copy__(self) -> Strategy:
        raise ContextError("a strategy owns threads and cannot be copied; make another one")

    def __repr__(self) -> str:
        devices = ", ".join(device.short for device in self.devices)
        return f"<Strategy {self.variable_mgr.name} on {devices}>"


@dataclass(frozen=True)
class _Spec:
    """What one replica asks for when it creates a variable."""

    value: np.ndarray[Any, Any]
    options: dict[str, Any]

    def essence(self, replica: int) -> dict[str, Any]:
        """Return what must be the same in all replicas.

        A name is the same without the replica's own scope and without numbers at the end of its
        parts, which only tell several of a name apart ("dense_1/kernel").
        """
        name = self.options["name"].replace(f"replica_{replica}/", "", 1)
        return {
            **self.options,
            "name": re.sub(r"_\d+(?=/|$)", "", name),
            "shape": self.value.shape,
            "dtype": self.value.dtype,
        }


def _create(strategy: Strategy, specs: Any) -> Variable:
    asked: Sequence[_Spec] = local_results(specs)
    ours = asked[0].essence(0)
    for replica, spec in enumerate(asked):
        for what, theirs in spec.essence(replica).items():
            if theirs != ours[what]:
                raise MergeMismatchError(
                    f"the replicas create different variables: {what} is {ours[what]!r} in replica "
                    f"0 and {theirs!r} in replica {replica}; all replicas must create the same "
                    "variables in the same order"
                )
    initial = [partial(operator.attrgetter("value"), spec) for spec in asked]
    return strategy.variable_mgr.create(strategy, initial, **asked[0].options)


def _options(given: dict[str, Any]) -> PolicyOptions:
    known = PolicyOptions.__dataclass_fields__
    for name in given:
        if name not in known:
            raise UsageError(f"no policy option is called {name!r}; there are {', '.join(known)}")
    return PolicyOptions(**given)


# --- the default strategy -----------------------------------------------------------------------


class _DefaultReplica:
    """The replica that there is when there is no strategy: the current thread."""

    replica_id = 0
    num_replicas = 1

    def __init__(self, strategy: _DefaultStrategy) -> None:
        self.strategy = strategy

    @property
    def device(self) -> Device:
        return context.device()

    def merge_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(strategy, *args, **kwargs)` at once: there is nobody to wait for."""
        with context.entered(replica=None):
            return fn(self.strategy, *args, **kwargs)

    def all_reduce(self, op: str, value: Any) -> Any:
        """Return `value`: it is its own sum and mean."""
        return value


class _DefaultStrategy(Strategy):
    """One replica on the calling thread."""

    def __init__(self) -> None:
        super().__init__("cpu", "independent")
        self.replica = _DefaultReplica(self)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def __repr__(self) -> str:
        return "<the default Strategy>"


def _install_default() -> None:
    strategy = _DefaultStrategy()
    frame_device = strategy.devices[0]
    context.set_default(strategy, strategy.replica, frame_device)


_install_default()
