"""Strategy: the public face. Devices and a policy; scope, run, reduce, update, and data sets.

    strategy = md.Strategy(md.devices("cpu*2"), variable_update="replicated")
    with strategy.scope():
        w = md.Variable(0.0, name="w")
    losses = strategy.run(step, images, labels)       # one thread for each device

With no strategy made there is still one: minidist.default_strategy.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from minidist import context, gathering, observe, reduction, updating
from minidist.cluster import Cluster, alone, connect, connected
from minidist.cluster.site import Site
from minidist.destinations import broadcast, devices_of
from minidist.device import Device, host
from minidist.device import devices as parse_devices
from minidist.errors import ContextError, UsageError
from minidist.input import (
    ENDS,
    DistributedDataset,
    InputContext,
    Share,
    deal,
    own_part,
    sources,
    split,
)
from minidist.patience import DEADLINE, REPORT_AFTER
from minidist.pool import Pool
from minidist.reduction import ReduceOp
from minidist.run import Run
from minidist.steps import MultiStepContext, run_steps
from minidist.threads import limit_blas, release_blas
from minidist.values import local_results
from minidist.variable import Variable
from minidist.variable_mgr import ACROSS, SERVED, PolicyOptions, VariableMgr, check, make


class Strategy:
    """Replicas on devices, and a policy for the variables they share.

    devices: names or Device objects, as `md.devices` takes them; one replica for each.
    variable_update: the name of a policy (see minidist.variable_mgr), or a VariableMgr.
    policy_options: see PolicyOptions.
    cluster: the processes that the policy is for, as `md.connect` returns them; by default all of
        the job, for the policies of several workers, and this one alone for the others.
        Of several workers all must make the same calls in the same order. What is for all replicas
        (gradients, reduce, gather, what they assign, what is read of their own values, creation) is
        for those of all workers; a merge function runs once in each. Where one worker's run fails
        all others' end in a PeerError that names it, and the strategy can be used no more.
    concurrent: replicas compute at the same time; False gives strict turns, replica 0 until it
        meets or returns, then replica 1 …, for debugging.
    report_after, deadline: seconds after which replicas that wait for one that does not come are
        reported, and the run fails (by default at least 60, and 10 × the longest run so far).

    A strategy is also a context manager that closes itself. Closing ends its threads; so does
    forgetting it, at some later time.
    A copy is a ContextError; a deep copy is a new strategy of the same devices and policy.
    Raises UsageError (a ValueError) for unknown names and for devices that are named twice.
    """

    def __init__(
        self,
        devices: str | Iterable[str | Device],
        variable_update: str | VariableMgr = "replicated",
        *,
        cluster: Cluster | None = None,
        concurrent: bool = True,
        report_after: float = REPORT_AFTER,
        deadline: float | None = None,
        **policy_options: Any,
    ) -> None:
        self.devices: tuple[Device, ...] = tuple(parse_devices(devices))
        for name, seconds in (("report_after", report_after), ("deadline", deadline)):
            if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
                raise UsageError(
                    f"{name} is a number of seconds above 0 (math.inf: never), not {seconds!r}"
                )
        self._report_after = report_after
        self._deadline = deadline
        self._longest = 0.0
        if isinstance(variable_update, VariableMgr):
            if policy_options:
                raise UsageError(
                    f"policy options {', '.join(policy_options)} come with a policy's name, "
                    "not with a VariableMgr"
                )
            self.variable_mgr = variable_update
            self._policy = None
            options = PolicyOptions()
            self.site = variable_update.site
        else:
            options = _options(policy_options)
            self._policy = (variable_update, policy_options)
            check(variable_update, options)
            self.site = self._find_site(variable_update, options, cluster)
            self.variable_mgr = make(variable_update, self.site, options)
        self._communicator = options.communicator(self.site)
        self.concurrent = concurrent
        self.step = 0  # runs so far; keys the random numbers of the next one
        self.failed_runs = 0
        self._pool = Pool()
        self._limited = False
        self._lock = threading.Lock()
        forgotten = weakref.finalize(self, self._pool.drop, partial(release_blas, self._pool))
        forgotten.atexit = False  # the pool is closed at exit

    def _find_site(
        self, variable_update: str, options: PolicyOptions, cluster: Cluster | None
    ) -> Site:
        """Return where the replicas are; without a cluster, the policy says whether there is one.

        Raises UsageError for a policy of one machine in a cluster of several workers.
        """
        served = variable_update in SERVED
        if cluster is None and variable_update in (*ACROSS, "distributed_replicated"):
            cluster = connect()
        elif cluster is None:  # but who has made ps means them
            known = connected() if served else None
            cluster = known if known is not None and known.servers else alone()
        if len(cluster.workers) > 1 and variable_update not in (*ACROSS, *SERVED, "independent"):
            raise UsageError(
                f"{variable_update} is for one worker, and {cluster!r} has more; use one of "
                f"{', '.join(ACROSS + SERVED)}"
            )
        patience = weak_patience(self)
        in_step = not served or options.cross_replica_sync  # all others meet, for gradients or not
        return Site.of(self.devices, cluster, in_step=in_step, patience=patience)

    # --- scopes

    @property
    def num_replicas(self) -> int:
        """How many replicas there are in sync: those of all machines, where they are."""
        return self.site.replicas

    @property
    def first_replica(self) -> int:
        """The number, among them, of this process's first one."""
        return self.site.first

    def scope(self) -> context.entered:
        """Return a with statement's way into this strategy's cross-replica context.

        Variables made in it belong to the strategy. Entering it again inside itself is fine.
        Raises ContextError inside another strategy's scope and inside a replica.
        """

        def change(old: context.Frame) -> dict[str, Any]:
            self._require("scope", replica="open it outside run, or inside merge_call")
            device = old.device if old.strategy is self else self.devices[0]
            return {"strategy": self, "replica": None, "device": device}

        change(context.frame())  # what is wrong now is said now
        return context.entered(change)

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
                f"{context.describe(frame)}, which is another one; leave that first"
            )
        if frame.replica is not None:
            raise ContextError(f"{verb} was called in {context.describe(frame)}; {replica}")

    # --- running

    @property
    def patience(self) -> tuple[float, float]:
        """Seconds after which a peer that does not come is reported, and is an error."""
        deadline = max(DEADLINE, 10 * self._longest) if self._deadline is None else self._deadline
        return self._report_after, deadline

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn` once for each replica, each on its own thread, and regroup what they return.

        Of PerReplica and Mirrored values in the arguments each replica gets its own component;
        everything else is passed as it is. Of the results, what is not the same object in all
        replicas becomes PerReplica; several replicas' numbers always do, because Python has one
        object for each small number. See minidist.run for how a run ends.

        Raises ContextError inside a replica or under another strategy, UsageError for a generator
        or coroutine function; what `fn` raises; see MergeMismatchError, HangError, StructureError.
        """
        self._require(
            "run", replica="use merge_call to act for all replicas, and run inside its function"
        )
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
            raise UsageError(
                f"run got {fn!r}, whose call does nothing but make a generator or coroutine; give "
                "it a plain function"
            )
        with self._lock:  # several threads may run a strategy at once; each run is a step
            if not self._limited and not self._pool.closed:
                limit_blas(self._pool, len(self.devices))
                self._limited = True
            self.step = step = self.step + 1
        started = time.monotonic()
        report_after, deadline = self.patience
        run = Run(
            self,
            self.devices,
            fn,
            args,
            kwargs,
            step=step,
            concurrent=self.concurrent,
            report_after=report_after,
            deadline=deadline,
        )
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        try:
            with observe.span("run", name, run=run.number, step=step, replicas=run.n):
                result = run(self._pool)
        except BaseException as failure:
            self.failed_runs += 1
            self.site.fail(failure)
            raise
        self._longest = max(self._longest, time.monotonic() - started)
        return result

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let runs in the with statement be no steps: what comes after goes on as if without."""
        step = self.step
        try:
            yield
        finally:
            self.step = step

    def close(self) -> None:
        """End the replicas' threads and give BLAS its threads back. Closing twice is fine.

        Its devices' streams stay, for these are not the strategy's alone.
        """
        self._pool.close()
        self.variable_mgr.close()
        self.site.leave()
        for device in (*self.devices, host()):
            device.trim()
        release_blas(self._pool)
        self._limited = False

    def __enter__(self) -> Strategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: object
    ) -> None:
        if failure is not None:  # other workers are not to wait for what will not come
            self.site.fail(failure)
        self.close()

    # --- for all replicas at once

    def reduce(
        self, op: ReduceOp | str, value: Any, axis: int | None = None, destinations: Any = None
    ) -> Any:
        """Return the sum or mean over the replicas of each leaf of a structure, in replica order.

        op: ReduceOp.SUM or MEAN, or "sum" or "mean". axis: also reduce each component over this
        axis first; a mean then divides by the true number of elements over all replicas.
        destinations: the devices that want the result, named as minidist.destinations says; by
        default those of the value's own components. On one device it is a Tensor, on several a
        Mirrored value; of Python numbers it is a number, which is on none.

        A mean is floating point, also of integers; booleans are counted. A leaf that is not
        distributed, or is Mirrored, is its own mean; its sum is only defined for 0 and for one
        replica. IndexedSlices stay sparse: their rows follow each other.
        Of several workers each gives its replicas' parts, and gets the result. In one that has a
        single replica, what is not distributed is this replica's own; in others it is the same in
        all replicas if it is the same, to the last bit, in all workers.
        Raises UsageError (a ValueError) for what cannot be reduced, ShapeError where the replicas'
        shapes or dtypes differ, TypeError for an axis that is no integer.
        """
        self._require("reduce")
        return reduction.reduce(self, self._communicator, op, value, axis, destinations)

    def batch_reduce(self, op: ReduceOp | str, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return `reduce(op, value, destinations=destinations)` for each pair of these, in order.

        What goes to the same devices is summed in one pass.
        """
        self._require("batch_reduce")
        return self._reduce_pairs(op, pairs)

    def _reduce_pairs(
        self, op: ReduceOp | str, pairs: Iterable[tuple[Any, Any]], *details: str
    ) -> list[Any]:
        """Do what batch_reduce does; details: what else all workers do alike, in words."""
        return reduction.batch_reduce(self, self._communicator, op, pairs, *details)

    def broadcast(self, value: Any, destinations: Any = None) -> Any:
        """Return each leaf of a structure on all destinations, by default the replicas' devices.

        On one device it is a Tensor, on several a Mirrored value; a Python number stays one.
        Raises UsageError (a ValueError) for a PerReplica value and for what is no number or array.
        """
        self._require("broadcast")
        wanted = self.devices if destinations is None else devices_of(destinations)
        return broadcast(value, wanted)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the replicas' components of each leaf one behind the other along an axis.

        Lengths along this axis may differ, and so may be 0. The result is one Tensor on the first
        replica's device, of several workers on that of each.
        Raises UsageError (a ValueError) for an axis that there is not and for a value that does not
        differ between several replicas, ShapeError where other lengths or dtypes differ, TypeError
        for an axis that is no integer.
        """
        self._require("gather")
        return gathering.gather(self, value, axis)

    def update(
        self,
        variable: Variable,
        fn: Callable[..., Any],
        *args: Any,
        group: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Call `fn(variable, *args, **kwargs)` for each copy, in an update context on its device.

        Reads and assigns inside are of that copy, and operations run on its device. Of Mirrored
        arguments each call gets the component on the device; of a PerReplica argument too where the
        copies are each a replica's own (ON_READ). Everything else is passed as it is.

        Return None, or with group=False what the calls returned, regrouped by device.
        Raises UsageError (a ValueError) for what is no variable of this strategy, and TypeError for
        a PerReplica argument.
        """
        self._require("update")
        return updating.update(self, variable, fn, args, kwargs, group)

    def update_non_slot(
        self, variables: Any, fn: Callable[..., Any], *args: Any, group: bool = True, **kwargs: Any
    ) -> Any:
        """Call `fn(*args, **kwargs)` once on each device of what belongs to no single variable.

        That is an optimizer's step count, say. The devices are those of the first of the variables
        by name, which under a policy with a copy for every replica are all. See `update` for the
        rest.
        """
        self._require("update_non_slot")
        return updating.update_non_slot(self, variables, fn, args, kwargs, group)

    def group(self, value: Any) -> None:
        """Wait until everything is done that the components of `value` come from."""
        updating.group(value)

    def colocate_vars_with(self, variable: Variable) -> context.entered:
        """Put the variables that are created in the with statement where this one's copies are.

        Raises UsageError (a ValueError) for what is no variable of this strategy.
        """
        return updating.colocated(self, variable)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a value's components in replica order, or a tuple of a value that has none."""
        return local_results(value)

    # --- input

    def distribute_dataset(
        self, batches: Iterable[Any], *, prefetch: int = 2, drop_remainder: bool = False
    ) -> DistributedDataset:
        """Split each global batch, a structure of arrays, over the replicas, larger parts first.

        Of several workers each must be given the same batches, and takes its own replicas' parts of
        them; where `batches` can make parts (see minidist.input.Divisible) it makes no more.
        The result is iterated over in cross-replica context, anew each time; see minidist.input.
        prefetch: how many batches at most are read ahead, by a thread. drop_remainder: leave out
        batches that have fewer examples than the first.
        """
        self._require("distribute_dataset")
        share = Share.of(self.site)
        return DistributedDataset(
            [own_part(batches, share)],
            partial(split, share),
            self.devices,
            lambda: self.patience,
            prefetch=prefetch,
            drop_remainder=drop_remainder,
        )

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: str = "per_worker",
        *,
        ends: str = "join",
        prefetch: int = 2,
        drop_remainder: bool = False,
    ) -> DistributedDataset:
        """Distribute what an input function makes: each element is one replica's batch.

        `input_fn(md.InputContext)` returns an iterable, or a function that returns the next element
        until it raises StopIteration. "per_worker": it is called once in each worker, and
        consecutive replicas there get consecutive elements. "per_replica": it is called for each
        replica, whose elements its are.
        ends: what happens when a replica is without data. "join": it gets empty arrays, until none
        has any; "drop": that ends the data for all; "pad": it gets again what it had, from the
        beginning, until all have had theirs. So all workers come to an end together.
        Raises UsageError (a ValueError) for another mode or end, for what input_fn must not return,
        and for "pad" with drop_remainder, which are opposites.
        """
        self._require("make_input_fn_iterator")
        if ends not in ENDS:
            raise UsageError(f"ends must be one of {', '.join(map(repr, ENDS))}, not {ends!r}")
        if ends == "pad" and drop_remainder:
            raise UsageError(
                "ends='pad' fills up the last batches, and drop_remainder leaves them out: give "
                "one of the two"
            )
        share = Share.of(self.site)
        return DistributedDataset(
            sources(input_fn, replication_mode, share),
            partial(deal, share, ends),
            self.devices,
            lambda: self.patience,
            prefetch=prefetch,
            drop_remainder=drop_remainder,
            peers=self.site.peers,
            ends=ends,
        )

    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call `fn(ctx, *inputs)` in cross-replica context for so many batches of an iterator.

        A batch that is a tuple is passed as several inputs. Returns ctx, with the outputs that the
        last step has set; with initial_loop_values, their structure must be the same.
        Raises EndOfDataError after the last full step where there are fewer batches; UsageError (a
        ValueError) for an iterator of another strategy; StructureError (a ValueError) for outputs
        of another structure.
        """
        self._require("run_steps")
        return run_steps(self, fn, iterator, iterations, initial_loop_values)

    def __copy__(self) -> Strategy:
        raise ContextError(
            "a strategy owns threads and cannot be copied; make another one, or use copy.deepcopy, "
            "which does"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a strategy owns threads and cannot be pickled; make it in the process that needs it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if self._policy is None:
            raise ContextError(
                f"{self!r} was made of a VariableMgr, whose parts may be no other strategy's; make "
                "another strategy with another VariableMgr"
            )
        name, options = self._policy
        other = Strategy(
            self.devices,
            name,
            cluster=self.site.cluster,
            concurrent=self.concurrent,
            report_after=self._report_after,
            deadline=self._deadline,
            **options,
        )
        other.step = self.step
        return other

    def __repr__(self) -> str:
        devices = ", ".join(device.short for device in self.devices)
        return f"<Strategy {self.variable_mgr.name} on {devices}>"


def weak_patience(strategy: Strategy) -> Callable[[], tuple[float, float]]:
    """Return a function that gives a strategy's patience and does not keep it alive."""
    of = weakref.ref(strategy)

    def patience() -> tuple[float, float]:
        alive = of()
        return (REPORT_AFTER, DEADLINE) if alive is None else alive.patience

    return patience


def _options(given: dict[str, Any]) -> PolicyOptions:
    known = PolicyOptions.__dataclass_fields__
    for name in given:
        if name not in known:
            raise UsageError(f"no policy option is called {name!r}; there are {', '.join(known)}")
    return PolicyOptions(**given)
