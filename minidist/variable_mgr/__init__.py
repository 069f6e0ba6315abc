"""Variable managers: every policy is a row of five parts.

| policy | place | read | combine | apply | start |
|---|---|---|---|---|---|
| independent | every replica | own | nothing | every replica | own values |
| parameter_server | host, or least loaded | fetched | mean at the variable | once, there | - |
| … caching | same | fetched, from a cache filled once a step | same | same | - |
| … staged_vars | same | last step's, from a StagingArea per replica | same | same | - |
| replicated | every replica | own | all-reduce | every replica | replica 0's |
| … in one memory | same | same | in the update | each its part of all copies | same |
| … relaxed | same | same | all-reduce of last step's, zeros at first | same | same |
| distributed_all_reduce, collective_all_reduce | same, all workers | own | all-reduce over all | \
every replica | rank 0's |

across.py has those whose variables are on parameter servers, which are processes of their own:
parameter_server in a cluster, and distributed_replicated.

A part is a class of its own, so a new policy is a new row, and at most a new part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minidist import comm
from minidist.cluster.site import Site
from minidist.device import Device, host
from minidist.errors import UsageError
from minidist.threads import cores
from minidist.variable_mgr import across
from minidist.variable_mgr.apply import Apply, EachAppliesItsPart, EveryReplicaApplies, OnceApplies
from minidist.variable_mgr.combine import (
    AllReduce,
    MeanAtVariable,
    MeetingOfAll,
    Nothing,
)
from minidist.variable_mgr.in_update import SumInUpdate
from minidist.variable_mgr.manager import VariableMgr
from minidist.variable_mgr.overlap import Overlap
from minidist.variable_mgr.place import EveryReplica, LeastLoaded, OnHost
from minidist.variable_mgr.read import Read, ReadCached, ReadFetched, ReadOwn
from minidist.variable_mgr.relaxed import LastStep
from minidist.variable_mgr.staged import ReadStaged
from minidist.variable_mgr.start import FromFirst, OwnValues

__all__ = ["POLICIES", "PolicyOptions", "VariableMgr", "make"]

GRADIENT_SCALES = ("mean", "original")
PARAMETER_DEVICES = ("cpu", "device", "gpu")
COMPACT = (False, True, "float16", "bfloat16")
CONSISTENCIES = ("strong", "relaxed")
OPTIONS_OF = {  # options that only some policies have
    "staged_vars": ("parameter_server",),
    "caching": ("parameter_server",),
    "cross_replica_sync": ("parameter_server",),
    "staleness_bound": ("parameter_server",),
    "variable_consistency": ("replicated", "distributed_all_reduce", "collective_all_reduce"),
}


@dataclass(frozen=True)
class PolicyOptions:
    """What a policy can be told. The options bear the flags' names.

    local_parameter_device: where a parameter server keeps variables: "cpu" (the host), or "device"
        ("gpu" is the ancestor's word for it), spread over the compute devices.
    gradient_scale: "mean" is the gradient of the mean loss over the global batch, in every policy;
        "original" the ancestor's mixture, in which `replicated` sums over the replicas.
    all_reduce_spec: which algorithm sums over the replicas, by their size; see minidist.comm.
    hierarchical_copy: the same as all_reduce_spec="hierarchical_copy".
    compact_gradient_transfer: "float16" (or True) or "bfloat16": each replica's gradients and their
        sum are rounded to 16 bits on their way; see comm/compact.py.
    staged_vars: replicas of `parameter_server` compute with values that are one step old, copied
        while that step ran; see variable_mgr/staged.py.
    caching: variables of `parameter_server` are copied once a step to where the replicas fetch them
        from: those below 64 Ki elements to the host, larger ones spread over the compute devices.
    cross_replica_sync: False lets `parameter_server` apply each worker's mean gradient when it
        comes, for workers that do not wait for each other.
    staleness_bound: how many steps such a worker may be ahead of the slowest; None: any number.
    variable_consistency: "strong", or "relaxed": `replicated` applies the gradients of the step
        before, and sums this step's while the next one computes.
    overlap: whether `minimize` sums gradients with the other replicas' while its backward pass
        goes on; None: on GPUs, and where there are more cores than replicas. It changes no bit.
    bucket_cap_mb: how many MiB of gradients it sums at a time; the first time 1.
    gradient_repacking: in how many buffers all tensors travel that are summed together; 0: packed
        in none. It changes no bit, nor do the next two.
    agg_small_grads_max_bytes, agg_small_grads_max_group: tensors of at most so many bytes travel
        up to so many in a buffer; 0 bytes: none does.
    """

    local_parameter_device: str = "cpu"
    gradient_scale: str = "mean"
    all_reduce_spec: str = "auto"
    hierarchical_copy: bool = False
    compact_gradient_transfer: bool | str = False
    staged_vars: bool = False
    caching: bool = False
    cross_replica_sync: bool = True
    staleness_bound: int | None = None
    variable_consistency: str = "strong"
    overlap: bool | None = None
    bucket_cap_mb: float = 25.0
    gradient_repacking: int = 0
    agg_small_grads_max_bytes: int = 0
    agg_small_grads_max_group: int = 10

    def __post_init__(self) -> None:
        _allow("local_parameter_device", self.local_parameter_device, PARAMETER_DEVICES)
        _allow("gradient_scale", self.gradient_scale, GRADIENT_SCALES)
        _allow("compact_gradient_transfer", self.compact_gradient_transfer, COMPACT)
        _allow("variable_consistency", self.variable_consistency, CONSISTENCIES)
        for name in (
            "staged_vars",
            "caching",
            "cross_replica_sync",
            "hierarchical_copy",
            "overlap",
        ):
            value = getattr(self, name)
            if type(value) is not bool and not (name == "overlap" and value is None):
                raise UsageError(f"{name}={value!r} is not known; it may be True or False")
        for name, least in (
            ("gradient_repacking", 0),
            ("agg_small_grads_max_bytes", 0),
            ("agg_small_grads_max_group", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r} is no whole number from {least}")
        if self.staleness_bound is not None:
            if type(self.staleness_bound) is not int or self.staleness_bound < 0:
                raise UsageError(
                    f"staleness_bound={self.staleness_bound!r} is no whole number from 0"
                )
            if self.cross_replica_sync:
                raise UsageError(
                    f"staleness_bound={self.staleness_bound} is for workers that do not take their "
                    "steps together; say cross_replica_sync=False beside it, or leave it out"
                )
        for name in ("staged_vars", "caching"):
            if getattr(self, name) and not self.cross_replica_sync:
                raise UsageError(
                    f"{name} and cross_replica_sync=False contradict each other: the values that "
                    "replicas would read again are of one step, and asynchronous workers have none "
                    "in common"
                )
        if type(self.bucket_cap_mb) not in (int, float) or not self.bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb={self.bucket_cap_mb!r} must be a number above 0")
        if self.staged_vars and self.caching:
            raise UsageError(
                "staged_vars and caching contradict each other: staged variables are copied to the "
                "replicas before these read them, so there is nothing to cache"
            )
        self.spec()  # raises what is wrong with it

    def spec(self) -> comm.Spec:
        """How tensors are summed: all_reduce_spec and hierarchical_copy as one."""
        spec = comm.parse(self.all_reduce_spec)
        if not self.hierarchical_copy:
            return spec
        if self.all_reduce_spec not in ("auto", "hierarchical_copy"):
            raise UsageError(
                f"hierarchical_copy and all_reduce_spec={self.all_reduce_spec!r} name two ways to "
                "sum; give one of them"
            )
        return comm.parse("hierarchical_copy")

    def communicator(
        self, site: Site, compact: bool | str = False, *, sums: bool = False
    ) -> comm.Communicator:
        """Return a communicator for the replicas of a site as the options want it.

        `compact` is compact_gradient_transfer where it is for gradients. sums: whether it is for
        what is summed while replicas go on. NCCL is for that alone, as whatever it is given must
        come in one order, of one thread.
        """
        spec = self.spec()
        if spec.by_nccl and not sums:
            spec = comm.parse("auto")
        devices = site.devices
        packer = comm.packer(
            self.gradient_repacking, self.agg_small_grads_max_bytes, self.agg_small_grads_max_group
        )
        reducers = [host()] if self.local_parameter_device == "cpu" else devices
        narrow = compact if isinstance(compact, str) else "float16" if compact else None
        return comm.make(
            spec,
            devices,
            packer,
            reducers=reducers,
            compact=narrow,
            peers=site.sums if sums else site.peers,
            counts=site.counts,
        )

    def for_gradients(self, site: Site) -> comm.Communicator:
        """Return the communicator that sums gradients, rounded where that is wanted."""
        return self.communicator(site, self.compact_gradient_transfer, sums=True)

    def overlapping(self, devices: Sequence[Device], combine: MeetingOfAll) -> Overlap | None:
        """Return what sums gradients during backward passes, or None where nothing does."""
        if not self.overlaps(devices) or combine.sums.site.replicas == 1:
            return None
        spare = cores() - len(devices)
        return Overlap(combine, len(devices), self.bucket_cap_mb * 2**20, max(1, spare))

    def overlaps(self, devices: Sequence[Device]) -> bool:
        """Whether sums are wanted during backward passes."""
        by_gpus = any(device.kind == "cuda" for device in devices)
        return cores() > len(devices) or by_gpus if self.overlap is None else self.overlap

    def sums_in_updates(self, site: Site) -> bool:
        """Whether replicas of one memory share the update of all copies, adding up gradients in it.

        That is so where nothing else is asked for, and it is the least work.
        """
        as_it_is_best = self.all_reduce_spec == "auto" and not self.hierarchical_copy
        packed = self.gradient_repacking > 0 or self.agg_small_grads_max_bytes > 0
        return (
            site.peers.count == 1
            and site.replicas > 1
            and all(device.ops.can_update_copies for device in site.devices)
            and as_it_is_best
            and not (packed or self.compact_gradient_transfer)
            and not self.overlaps(site.devices)
        )


def independent(site: Site, options: PolicyOptions) -> VariableMgr:
    """Every replica trains a model of its own."""
    return VariableMgr(
        "independent",
        site.devices,
        place=EveryReplica(site.devices),
        read=ReadOwn(),
        combine=Nothing(),
        apply=EveryReplicaApplies(),
        start=OwnValues(site.first),
        site=site,
    )


def parameter_server(site: Site, options: PolicyOptions) -> VariableMgr:
    """One copy of each variable, fetched each step; the mean gradient is applied to it once.

    In a cluster that copy is on a ps. Who is the only process of one needs none.
    """
    if site.cluster.size > 1:
        return across.parameter_server(site, options)
    devices = site.devices
    place = OnHost(devices) if options.local_parameter_device == "cpu" else LeastLoaded(devices)
    combine = MeanAtVariable(options.for_gradients(site), original=_original(options, "mean"))
    read: Read = ReadCached(devices) if options.caching else ReadFetched(devices)
    if options.staged_vars:
        read = ReadStaged(devices)
    return VariableMgr(
        f"parameter_server{'+staged_vars' * options.staged_vars}",
        devices,
        place=place,
        read=read,
        combine=combine,
        apply=OnceApplies(),
        start=FromFirst(site.peers),
        site=site,
        overlap=options.overlapping(devices, combine),
    )


def replicated(site: Site, options: PolicyOptions) -> VariableMgr:
    """A copy with every replica; gradients are all-reduced, and each replica updates its own."""
    return _replicated("replicated", site, options)


def distributed_all_reduce(site: Site, options: PolicyOptions) -> VariableMgr:
    """As `replicated`, over the replicas of all workers."""
    return _replicated("distributed_all_reduce", site, options)


def collective_all_reduce(site: Site, options: PolicyOptions) -> VariableMgr:
    """The same, by the name of the ancestor's later one."""
    return _replicated("collective_all_reduce", site, options)


def distributed_replicated(site: Site, options: PolicyOptions) -> VariableMgr:
    """As `replicated`, but the gradients are applied on the ps; who is alone needs none."""
    if site.cluster.size > 1:
        return across.distributed_replicated(site, options)
    return _replicated("distributed_replicated", site, options)


def _replicated(name: str, site: Site, options: PolicyOptions) -> VariableMgr:
    relaxed = options.variable_consistency == "relaxed"
    in_update = options.sums_in_updates(site) and not relaxed
    kind = SumInUpdate if in_update else AllReduce
    combine: MeetingOfAll
    combine = kind(options.for_gradients(site), site, original=_original(options, "sum"))
    apply: Apply = EachAppliesItsPart() if in_update else EveryReplicaApplies()
    if relaxed:
        combine = LastStep(combine)
    return VariableMgr(
        f"{name}{'+relaxed' * relaxed}",
        site.devices,
        place=EveryReplica(site.devices),
        read=ReadOwn(),
        combine=combine,
        apply=apply,
        start=FromFirst(site.peers),
        site=site,
        overlap=options.overlapping(site.devices, combine),
    )


POLICIES: dict[str, Callable[[Site, PolicyOptions], VariableMgr]] = {
    "independent": independent,
    "parameter_server": parameter_server,
    "replicated": replicated,
    "distributed_replicated": distributed_replicated,
    "distributed_all_reduce": distributed_all_reduce,
    "collective_all_reduce": collective_all_reduce,
}
ACROSS = ("distributed_all_reduce", "collective_all_reduce")  # policies for several workers
SERVED = ("parameter_server", "distributed_replicated")  # those that keep variables on ps, if any


def check(variable_update: str, options: PolicyOptions) -> None:
    """Raise UsageError for a policy that there is not, and for options that it has not."""
    _allow("variable_update", variable_update, tuple(POLICIES))
    _check_whose(variable_update, options)


def make(variable_update: str, site: Site, options: PolicyOptions) -> VariableMgr:
    """Return the variable manager of that name, for the replicas of a site."""
    check(variable_update, options)
    return POLICIES[variable_update](site, options)


def _check_whose(policy: str, options: PolicyOptions) -> None:
    """Raise UsageError for an option that only other policies have."""
    for option, owners in OPTIONS_OF.items():
        value = getattr(options, option)
        if policy not in owners and value != getattr(PolicyOptions, option):
            raise UsageError(
                f"{option}={value!r} is for {', '.join(owners)}; leave it out, or let "
                f"variable_update be {' or '.join(map(repr, owners))} and not {policy!r}"
            )


def _original(options: PolicyOptions, factor: str) -> str | None:
    return factor if options.gradient_scale == "original" else None


def _allow(option: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        known = ", ".join(map(str, allowed))
        raise UsageError(f"{option}={value!r} is not known; it may be {known}")
