"""Served: the parts of the policies whose variables are held by ps.

place      each worker has a copy of every variable, or each of its replicas has
read       replicas fetch from the worker's copy, or have their own
combine    the worker's sum goes into the messages to the ps
apply      the ps apply the sum over all workers, or each worker's mean, and answer with the new
           values, which the copies take; late.py has them take it while the next step runs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from minidist import context, observe
from minidist.assigning import Change, added
from minidist.cluster import wire
from minidist.cluster.site import Site
from minidist.cluster.wire import Part
from minidist.comm import Communicator, Row, allocate_row
from minidist.device import Array, Device, host
from minidist.optim.optimizer import all_finite, global_norm
from minidist.tape import Gradient, stop_recording
from minidist.tensor import Tensor, to_device
from minidist.traffic import Outline, Traffic
from minidist.variable import AggregatingVariable, Copy, Reader, Variable
from minidist.variable_mgr.agreement import Agreement
from minidist.variable_mgr.apply import Apply
from minidist.variable_mgr.combine import MeanAtVariable, whole
from minidist.variable_mgr.contribution import Combined, Contribution
from minidist.variable_mgr.group import Group
from minidist.variable_mgr.place import LeastLoaded
from minidist.variable_mgr.pushing import Outgoing, Sent, network_bytes
from minidist.variable_mgr.read import FetchingReader, ReadFetched
from minidist.variable_mgr.servers import Servers
from minidist.variable_mgr.sparse import sum_rows

if TYPE_CHECKING:
    from minidist.optim import Optimizer


# --- copies ---------------------------------------------------------------------------------------


class ServedCopy(Copy):
    """A copy of a variable that a ps holds: what is written here goes on to the ps."""

    __slots__ = ()

    def write(self, value: Tensor) -> None:
        super().write(value)
        variable = self.container
        if variable is not None:
            variable.strategy.variable_mgr.servers.wrote(variable)


class Apart(AggregatingVariable):
    """A variable on a ps to which every worker assigns by itself."""

    __slots__ = ()

    def _assign_in_replica(self, replica: context.ReplicaContext, change: Any, value: Any) -> None:
        if len(self.strategy.devices) == 1:
            self.reader.change(self.copies, change, value)
        else:
            super()._assign_in_replica(replica, change, value)

    def _assign_for_all(self, change: Any, value: Any) -> None:
        self.reader.change(self.copies, change, value)


class OnEveryWorker:
    """A copy with every worker: on the host, or spread over its compute devices.

    apart: whether workers assign each by itself.
    """

    def __init__(self, site: Site, *, spread: bool, apart: bool) -> None:
        self.kind = Apart if apart else AggregatingVariable if site.replicas > 1 else Variable
        self._spread = LeastLoaded(site.devices) if spread else None

    def devices(self, nbytes: int, beside: Device | None = None) -> Sequence[Device]:
        return (host(),) if self._spread is None else self._spread.devices(nbytes, beside)


# --- combine --------------------------------------------------------------------------------------


class SumForServers(MeanAtVariable):
    """This worker's sum, in the messages to the ps; the factor is for the sum over all workers.

    mean_of_worker: it is for this worker's sum, whatever the counts, as the ancestors had it.
    """

    def __init__(
        self, communicator: Communicator, site: Site, servers: Servers, *, mean_of_worker: bool
    ) -> None:
        super().__init__(communicator, original=None)
        self._own = slice(site.first, site.first + len(site.devices))
        self._mean_of_worker = mean_of_worker
        self._servers = servers
        self.used: Sequence[int] = ()  # the variables that any replica has used, in this step
        self._spare: WeakKeyDictionary[Group, Row] = WeakKeyDictionary()

    def outgoing(self, group: Group, optimizer: Optimizer) -> Outgoing:
        """Return the messages of a group."""
        if group.outgoing is None:
            group.outgoing = Outgoing(self._servers, group, optimizer)
        outgoing: Outgoing = group.outgoing
        return outgoing

    def combine(
        self, contributions: Sequence[Contribution], agreed: Agreement, threads: int
    ) -> Combined | None:
        """Return this worker's sums, for all variables of the group; None: it brings nothing.

        That is so of variables that no replica has used, and of all where its own replicas have no
        example and others have.
        """
        group = contributions[0].group
        self.used = agreed.used
        self.outgoing(group, contributions[0].optimizer)
        combined = super().combine(contributions, agreed, threads)
        if combined is not None and combined.group is not group:
            sums = dict(zip(agreed.used, combined.rows[0], strict=True))
            combined.rows = [[sums.get(i) for i in range(len(group.variables))]]
            combined.group = group
        return combined

    def weights(self, counts: Sequence[int | None]) -> tuple[list[float] | None, float | None]:
        weights, scale = super().weights(counts)
        if scale is not None and self._mean_of_worker:
            return None, 1 / (self._own.stop - self._own.start)
        return None if weights is None else weights[self._own], scale

    def sum_all(
        self,
        group: Group,
        sources: Sequence[Row],
        weights: list[float] | None,
        threads: int,
        turn: int,
        sparse: Sequence[int],
        *,
        reusable: bool = False,
    ) -> Sequence[Sequence[Gradient]]:
        """Return one row, on the host: of this process's sums, or of nothing without an example."""
        row: list[Gradient | None] = [None] * len(group.variables)
        if weights is not None and not any(weights):
            return [row]
        dense = [i for i in range(len(row)) if i not in sparse]
        if dense:
            part = group.part(dense) if sparse else group
            chosen = [whole(part.variables, source.part(dense)) for source in sources]
            into = self._into(part)
            self.sum_into([into], chosen, weights, threads)
            for i, total in zip(dense, into, strict=True):
                row[i] = total
        for i in sparse:
            with_a_say = [
                None if weights is not None and not weights[k] else source[i]
                for k, source in enumerate(sources)
            ]
            if any(part is not None for part in with_a_say):
                row[i] = sum_rows(with_a_say, weights).to(host())
        return [row]

    def _into(self, group: Group) -> Row:
        """Return where the sums of a group go: into its messages, where it is sent as a whole."""
        outgoing: Outgoing | None = group.outgoing
        if outgoing is not None:
            return outgoing.row()
        row = self._spare.get(group)
        if row is None:
            kinds = [(host(), (v.shape, v.dtype)) for v in group.variables]
            row = self._spare[group] = allocate_row(kinds)
        return row

    def sum_bytes(self, variables: Sequence[Variable]) -> Traffic:
        """To the host, from there to the ps, and from these by the host to the copies."""
        outlines = [Outline.of(variable) for variable in variables]
        traffic = self._communicator.predicted_bytes(outlines, [[host()] * len(outlines)])
        traffic.update(network_bytes(self._servers, variables))
        for variable in variables:
            for copy in variable.copies:
                traffic.go(host(), copy.device, Outline.of(variable).nbytes)
        return traffic


# --- read -----------------------------------------------------------------------------------------


class ReadApart(ReadFetched):
    """As ReadFetched; what replicas assign goes to the ps."""

    def reader(self, copies: Sequence[Copy]) -> Reader:
        return ApartReader(copies, self._devices)


class ApartReader(FetchingReader):
    """What replicas add to a variable is added on its ps, to what is there then."""

    def change(self, copies: Sequence[Copy], change: Change, value: Any) -> None:
        variable = self.copy.container
        assert variable is not None  # it is being assigned
        variable.strategy.variable_mgr.servers.change(variable, change, value)

    def follow(self, copies: Sequence[Copy], mean: Tensor, momentum: float) -> None:
        with stop_recording():
            delta = (to_device(mean, self.copy.device) - self.copy.tensor) * (1 - momentum)
        self.change(copies, added, delta)


# --- apply ----------------------------------------------------------------------------------------


class ServersApply(Apply):
    """The ps apply the gradients; the copies here take what has come of the variables.

    workers: how many push for one step, each of which is a step by itself where they go `in turn`.
    """

    def __init__(self, sums: SumForServers, servers: Servers) -> None:
        self._sums = sums
        self._servers = servers
        self._workers = len(servers.site.cluster.workers)
        self._sent: Sent | None = None  # whose answer is known to be that it was applied

    def accepts(self, optimizer: Optimizer, combined: Combined) -> bool:
        """Whether the gradients are applied: they are not if they must be finite and are not.

        The ps tell, once they have the sums. Each worker tells for itself where each makes a step.
        """
        if not optimizer.must_be_finite:
            return True
        if self._servers.apart:
            if optimizer.accepts([_finite(combined.rows[0])]):
                return True
            self.without_example(combined.group, optimizer)
            return False
        sent = self._push(optimizer, combined)
        sent.wait()
        self._sent = sent
        return optimizer.accepts([sent.applied])

    def without_example(self, group: Group, optimizer: Optimizer) -> None:
        """Tell the ps that this worker has taken a step of its own without any gradients."""
        if not self._servers.apart:
            return
        gradients = [None] * len(group.variables)
        sent = self._sums.outgoing(group, optimizer).send(optimizer, gradients, 1.0, wire.NO_STEP)
        sent.wait()
        self._take(group, sent)

    def in_meeting(self, optimizer: Optimizer, combined: Combined, threads: int) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            sent = self._push(optimizer, combined)
        sent.wait()
        if observe.counting:
            self._tell_ages(combined, sent)
        self._count(optimizer, combined.group, sent)
        self._take(combined.group, sent)

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        pass

    def _push(self, optimizer: Optimizer, combined: Combined) -> Sent:
        gradients, scale, flags = combined.rows[0], combined.scale, 0
        outgoing = self._sums.outgoing(combined.group, optimizer)
        if optimizer.must_be_finite:
            flags |= wire.MUST_BE_FINITE
            if _finite(gradients):
                flags |= wire.FINITE
        replaced: dict[str, float | None] = {}
        limit = optimizer.gradient_clip_norm
        if limit is not None and self._servers.how != "together":
            norm = global_norm([host()] * len(gradients), gradients, 1) * scale
            scale *= min(1.0, limit / norm) if norm else 1.0
            replaced["gradient_clip_norm"] = None
        self._servers.flush()
        return outgoing.send(optimizer, gradients, scale, flags, **replaced)

    def _count(self, optimizer: Optimizer, group: Group, sent: Sent | None) -> None:
        """Let the optimizer know how often it has been applied."""
        if self._servers.apart:
            assert sent is not None
            steps = sent.steps
        else:
            steps = optimizer.iterations + (self._workers if self._servers.how == "in turn" else 1)
        optimizer.restore_iterations([steps] * group.places)

    def _take(self, group: Group, sent: Sent) -> None:
        """Let the copies take what has come of the variables."""

        def put(i: int, part: Part) -> None:
            copy = group.variables[i].copies[0]
            put_part(copy, copy.array, part)
            copy.version = sent.left[i] if self._servers.apart else copy.version + 1

        sent.each(put)

    def _tell_ages(self, combined: Combined, sent: Sent) -> None:
        """Tell how old gradients were to the copies, or to the variables on the ps."""
        if not self._servers.apart:
            combined.tell_ages(0)
            return
        for (replica, variable), version in combined.came_from.items():
            found = sent.found[combined.group.index[id(variable)]]
            observe.applied(variable.name, replica, found - version)


class ShadowsApply(ServersApply):
    """The ps apply the gradients to shadows; every replica copies what has come to its own."""

    def _take(self, group: Group, sent: Sent) -> None:
        self._came = sent

    def _tell_ages(self, combined: Combined, sent: Sent) -> None:
        pass  # each replica tells its own

    def in_replica(
        self, optimizer: Optimizer, combined: Combined, replica: int, threads: int
    ) -> None:
        if observe.counting:
            combined.tell_ages(replica, replica)

        def put(i: int, part: Part) -> None:
            copy = combined.group.variables[i].copies[replica]
            put_part(copy, copy.array, part)
            copy.version += 1

        self._came.each(put)


def put_part(copy: Copy, array: Array, part: Part) -> None:
    """Put what has come of a variable into the array of a copy."""
    device = copy.device
    if isinstance(part, tuple):
        rows, values = (device.copy_in(each) for each in part)
        device.ops.scatter(array, rows, values)
    elif part is not None:
        device.copy(array, part)
        if observe.counting and device is not host():
            observe.moved("host", device.short, part.nbytes, "sums")


def _finite(gradients: Sequence[Gradient | None]) -> bool:
    return all_finite([host()] * len(gradients), gradients)
