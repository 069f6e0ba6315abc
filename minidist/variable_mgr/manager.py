"""VariableMgr: five parts put together, and the way of a gradient through them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from minidist import context, diagnosis
from minidist.cluster.site import Site
from minidist.comm.peers import Peers
from minidist.creation import VariableSynchronization, as_array
from minidist.device import Array, Device
from minidist.errors import UsageError
from minidist.sync_on_read import SyncOnReadVariable
from minidist.tape import Gradient
from minidist.threads import cores
from minidist.traffic import Traffic
from minidist.values import local_results
from minidist.variable import Copy, Variable, make
from minidist.variable_mgr.agreement import NEVER, find
from minidist.variable_mgr.apply import Apply
from minidist.variable_mgr.combine import MeetingOfAll, Nothing
from minidist.variable_mgr.contribution import Combined, Contribution, check_same
from minidist.variable_mgr.group import Group
from minidist.variable_mgr.held import Held
from minidist.variable_mgr.overlap import Overlap
from minidist.variable_mgr.place import Place
from minidist.variable_mgr.read import OwnReader, Read
from minidist.variable_mgr.servers import Servers
from minidist.variable_mgr.start import Initial, Start

if TYPE_CHECKING:
    from minidist.context import ReplicaContext
    from minidist.optim import Optimizer

ON_READ = VariableSynchronization.ON_READ


@dataclass(eq=False)
class VariableMgr:
    """A policy: who owns a variable, in five answers.

    place      where its copies live
    read       what a replica computes with
    combine    how gradients meet
    apply      who runs the optimizer
    start      what the copies hold before the first step
    """

    name: str
    devices: tuple[Device, ...]
    place: Place
    read: Read
    combine: Nothing | MeetingOfAll
    apply: Apply
    start: Start
    overlap: Overlap | None = None  # what is summed during backward passes: nothing
    site: Site = None  # type: ignore[assignment]  # of one process, if not given
    servers: Servers | None = None  # the parameter servers that hold the variables: none
    copy: type[Copy] = Copy
    _groups: WeakSet[Group] = field(default_factory=WeakSet, init=False, repr=False)
    _grouping: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.site is None:
            self.site = Site.alone(self.devices)

    # --- variables

    def create(
        self,
        strategy: Any,
        initial: Sequence[Initial],
        *,
        name: str,
        dtype: Any,
        beside: Variable | None = None,
        **options: Any,
    ) -> Variable:
        """Return a new variable with its copies in place. Runs once, in cross-replica context.

        `initial` has a function for each replica that gives its initial value. A variable of one
        copy is put where the (first) copy of `beside` is.
        """
        values: Sequence[Array] = [as_array(value, dtype) for value in self.start.values(initial)]
        values = self.start.met(values, [f"{name!r}", *_in_words(options)])
        shelf = None
        if self.servers is not None and options["synchronization"] is not ON_READ:
            shelf, value = self.servers.create(name, values[0], beside, options)
            values = [value] * len(values)
        if options["synchronization"] is ON_READ:
            SyncOnReadVariable.check(name, values[0].dtype, options["aggregation"])
            devices: Sequence[Device] = self.devices
        else:
            device = beside.copies[0].device if beside is not None else None
            devices = self.place.devices(values[0].nbytes, device)
        copy = Copy if shelf is None else self.copy
        copies = [
            copy(
                _copy_name(name, i),
                self._kept(device, values[i]),
                device,
                options["decays"],
            )
            for i, device in enumerate(devices)
        ]
        variable = self._put_together(strategy, copies, name=name, **options)
        if self.servers is not None and shelf is not None:
            self.servers.adopt(variable, shelf)
        return variable

    def twin(self, variable: Variable, *, slot: bool = False, **changes: Any) -> Variable:
        """Return a variable like another one, with copies of its copies; `changes` are options."""
        options = {
            "name": variable.name,
            "trainable": variable.trainable,
            "synchronization": variable.synchronization,
            "aggregation": variable.aggregation,
            "decays": variable.decays,
            **changes,
        }
        shelf = None
        if self.servers is not None and self.servers.task_of(variable) is not None:
            first = variable.copies[0]
            value = first.device.copy_out(first.array)
            shelf, _ = self.servers.create(options["name"], value, variable, options)
        copies: list[Copy] = []
        for i, copy in enumerate(variable.copies):
            shared = slot and self.apply.in_parts and i > 0
            array = copies[0].array if shared else self._kept(copy.device, copy.array)
            name = _copy_name(options["name"], i)
            copies.append(type(copy)(name, array, copy.device, options["decays"]))
        twin = self._put_together(variable.strategy, copies, slot=slot, **options)
        if self.servers is not None and shelf is not None:
            self.servers.adopt(twin, shelf)
        return twin

    def slot(self, variable: Variable, name: str, value: float) -> Variable:
        """Return a new variable full of `value` with a copy beside each of another's.

        Where replicas update parts of all copies these share one memory, each element of which only
        the replica whose part it is in reads and writes.
        Raises UsageError for a variable that is on a ps: so are its slots.
        """
        if self.servers is not None and self.servers.task_of(variable) is not None:
            raise UsageError(
                f"{name!r} is on {self.servers.names[self.servers.task_of(variable) or 0]}, where "
                f"{variable.name!r} is, and nowhere else; a checkpoint has it"
            )
        slot = self.twin(variable, slot=True, name=name, trainable=False, decays=False)
        for copy in slot.copies:
            copy.device.ops.fill(copy.array, value)
        return slot

    def _kept(self, device: Device, array: Array) -> Array:
        """Return a copy on a device, to stay there; a mere move, of which no instrument is told."""
        kept = device.allocate(array.shape, array.dtype)
        device.copy(kept, array)
        return kept

    def _put_together(
        self, strategy: Any, copies: Sequence[Copy], *, slot: bool = False, **options: Any
    ) -> Variable:
        """Return a variable of these copies, of the kind that the policy makes of them."""
        if options["synchronization"] is ON_READ:
            return make(SyncOnReadVariable, copies, OwnReader(copies), strategy, **options)
        kind = Variable if context.is_default(strategy) else self.place.kind
        reader = self.read.slot(copies) if slot else self.read.reader(copies)
        return make(kind, copies, reader, strategy, **options)

    @property
    def independent(self) -> bool:
        """Whether each replica trains a model of its own, all of which belong in a checkpoint."""
        return not isinstance(self.combine, MeetingOfAll)

    @property
    def held(self) -> Sequence[Held]:
        """What the policy holds from step to step beside the variables."""
        return (*self.read.held, *self.combine.held)

    def close(self) -> None:
        """Give back what is held beside memory; nothing will be run any more."""
        self.read.close()
        if isinstance(self.combine, MeetingOfAll):
            self.combine.close()
        self.apply.close()
        if self.servers is not None:
            self.servers.close()

    # --- gradients

    def contribution(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        count: int | None,
        replica: ReplicaContext | None = None,
    ) -> Contribution:
        """Return what gradients of these variables are to be given to, one replica's.

        With a replica they may be summed with the others' as they are given, where the policy
        overlaps, and sums may be put into their arrays: they must be final, and nobody else's.
        """
        group = self._group(optimizer, variables)
        empty: list[Gradient | None] = [None] * len(variables)
        scale = 1 / optimizer.current_loss_scale
        contribution = Contribution(group, count, optimizer, empty, scale)
        contribution.reusable = replica is not None
        if replica is not None:
            if self.overlap is not None:
                self.overlap.join(contribution, replica.local_id)
            else:
                contribution.bucket = self.combine.bucket(group)
        return contribution

    def apply_gradients(self, replica: ReplicaContext, contribution: Contribution) -> None:
        """Bring one replica's gradients: combine them with the others', update the variables.

        Called by every replica on its own thread. When it returns, the replica computes with the
        new values.
        """
        optimizer = contribution.optimizer
        contribution.given_all()
        combined: Combined | None
        if isinstance(self.combine, MeetingOfAll):
            combined = replica.merge_call(_meet, self, contribution)
        else:
            run = context.frame().run
            if run is not None:
                run.check()  # one that was abandoned trains no model any more
            combined = self.combine.combine(contribution, replica.local_id)
            if optimizer.must_be_finite:
                finite = None if combined is None else combined.finite()
                if not replica.merge_call(_agree, optimizer, finite):
                    combined = None
        if combined is None:
            return
        threads = max(1, cores() // len(self.devices))
        try:
            self.apply.in_replica(optimizer, combined, replica.local_id, threads)
        except BaseException as failure:
            diagnosis.note(
                failure,
                f"replica {replica.replica_id} did not finish its update, and others may have: "
                "copies of the variables may differ, or be of two steps in part, until they are "
                "loaded or assigned, and what the optimizer keeps beside them (momenta, its count "
                "of updates) until a checkpoint of the training is loaded",
            )
            raise
        if self.apply.in_parts:
            replica.merge_call(_updated)

    def distributed_apply(self, contributions: Sequence[Contribution]) -> None:
        """Do for all replicas, one after the other, what each does in `apply_gradients`.

        Runs in cross-replica context.
        """
        optimizer = contributions[0].optimizer
        if isinstance(self.combine, MeetingOfAll):
            results = [self.meet(contributions)] * len(contributions)
        else:
            results = [
                self.combine.combine(contribution, replica)
                for replica, contribution in enumerate(contributions)
            ]
            if optimizer.must_be_finite:
                finite = [None if each is None else each.finite() for each in results]
                if not optimizer.accepts(_of_all(self.site.peers, finite)):
                    return
        for replica, combined in enumerate(results):
            if combined is not None:
                self.apply.in_replica(optimizer, combined, replica, cores())

    def meet(self, contributions: Sequence[Contribution]) -> Combined | None:
        """Combine, in the meeting, what all replicas brought, and apply what is applied there."""
        assert isinstance(self.combine, MeetingOfAll)
        check_same(contributions, self.site.first)
        overlap = self.overlap
        filled = NEVER if overlap is None else overlap.filled(contributions)
        agreed = find(contributions, self.site.peers, filled)
        if overlap is not None:
            overlap.met(contributions[0].group, agreed)
        optimizer = contributions[0].optimizer
        threads = cores() if len(self.devices) > 1 else 1
        combined = self.combine.combine(contributions, agreed, threads)
        if combined is None:
            self.apply.without_example(contributions[0].group, optimizer)
            return None
        if not self.apply.accepts(optimizer, combined):
            return None
        run = context.frame().run
        if run is not None:
            run.check()
        self.read.before_update()
        self.apply.in_meeting(optimizer, combined, threads)
        self.read.after_update()
        return combined

    def predicted_bytes(
        self,
        variables: Sequence[Variable],
        *,
        read: Sequence[Variable] | None = None,
        summed: Sequence[Variable] | None = None,
        runs: int = 1,
    ) -> Traffic:
        """Return what moves from device to device for one update by `minimize`, from shapes only.

        variables: all there are; the trainable ones are those that it minimizes by, in that order.
        read: those that every replica reads in a run: by default the trainable ones. summed: those
        of which a replica has a gradient that is no IndexedSlices: by default the trainable ones
        that are read. runs: how many there are to an update (gradient_accumulation_steps).

        Every replica is taken to have an example. What else a program moves (its input, its own
        assignments and reductions, rows of sparse gradients) no policy knows.
        """
        trainable = [variable for variable in variables if variable.trainable]
        if read is None:
            read = trainable
        if summed is None:
            summed = [variable for variable in read if variable.trainable]
        rows: list[Sequence[Variable]] = []
        if trainable:
            rows += [[trainable[i] for i in bucket] for bucket in self._buckets(trainable)]
        in_buckets = {variable for row in rows for variable in row}
        rest = [variable for variable in summed if variable not in in_buckets]
        traffic = self.read.predicted_bytes(variables, read, runs)
        group = self._group_of(trainable)
        optimizer = None if group is None else group.optimizer()
        summed_together = [*rows, rest] if rest else rows
        traffic.update(self.combine.predicted_bytes(summed_together, optimizer))
        traffic.update(self.apply.predicted_bytes(summed_together))
        return traffic

    def _buckets(self, variables: Sequence[Variable]) -> Sequence[Sequence[int]]:
        """Return which of some variables are summed together during a backward pass."""
        group = self._group_of(variables)
        return () if self.overlap is None or group is None else self.overlap.buckets(group)

    def _group_of(self, variables: Sequence[Variable]) -> Group | None:
        """Return a group of these variables that gradients have been given for."""
        for group in self._groups:
            if list(group.variables) == list(variables):
                return group
        return None

    def _group(self, optimizer: Optimizer, variables: Sequence[Variable]) -> Group:
        """Return an optimizer's group of these variables; the same one whenever asked again.

        The optimizer keeps it, so that it lives no longer than that.
        """
        key = tuple(map(id, variables))
        group: Group | None = optimizer.groups.get(key)
        if group is not None:
            return group
        for variable in variables:
            if variable.everywhere and not self.place.kind.everywhere:
                raise UsageError(
                    f"variable {variable.name!r} is ON_READ, each replica's own, but under "
                    f"{self.name} gradients are applied once, where a variable's only copy is; "
                    "assign it, or create it without ON_READ"
                )
        with self._grouping:  # all replicas ask at once, and must get the same one
            group = optimizer.groups.get(key)
            if group is None:
                group = optimizer.groups[key] = Group(variables, optimizer)
                self._groups.add(group)
            return group


def _meet(strategy: Any, manager: VariableMgr, contributions: Any) -> Combined | None:
    return manager.meet(local_results(contributions))


def _updated(strategy: Any) -> None:
    """Go on: every replica has updated its part of all copies."""


def _agree(strategy: Any, optimizer: Optimizer, finite: Any) -> bool:
    return optimizer.accepts(_of_all(strategy.site.peers, local_results(finite)))


_ANSWERS = (None, False, True)


def _of_all(peers: Peers, finite: Sequence[bool | None]) -> list[bool | None]:
    """Return what all replicas say, also those of other workers."""
    brought = bytes(map(_ANSWERS.index, finite))
    every = peers.meet("find out whether gradients are finite", brought)
    return [_ANSWERS[answer] for each in every for answer in each]


def _in_words(options: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def _copy_name(name: str, i: int) -> str:
    return name if i == 0 else f"{name}/replica_{i}"
