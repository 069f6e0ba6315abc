"""Variable managers: every policy is a row of five parts.

| policy | place | read | combine | apply | start |
|---|---|---|---|---|---|
| independent | every replica | own | nothing | every replica | own values |
| parameter_server | host, or least loaded | fetched | mean at the variable | once, there | - |
| replicated | every replica | own | all-reduce | every replica | replica 0's |

A part is a class of its own, so a new policy is a new row, and at most a new part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minidist import comm
from minidist.device import Device
from minidist.errors import UsageError
from minidist.variable_mgr.apply import EveryReplicaApplies, OnceApplies
from minidist.variable_mgr.combine import AllReduce, MeanAtVariable, Nothing
from minidist.variable_mgr.manager import VariableMgr
from minidist.variable_mgr.place import EveryReplica, LeastLoaded, OnHost
from minidist.variable_mgr.read import ReadFetched, ReadOwn
from minidist.variable_mgr.start import FromFirst, OwnValues

__all__ = ["POLICIES", "PolicyOptions", "VariableMgr", "make"]

GRADIENT_SCALES = ("mean", "original")
PARAMETER_DEVICES = ("cpu", "device", "gpu")


@dataclass(frozen=True)
class PolicyOptions:
    """What a policy can be told. The options bear the flags' names.

    local_parameter_device: where a parameter server keeps variables: "cpu" (the host), or "device"
        ("gpu" is the ancestor's word for it), spread over the compute devices.
    gradient_scale: "mean" is the gradient of the mean loss over the global batch, in every policy;
        "original" the ancestor's mixture, in which `replicated` sums over the replicas.
    all_reduce_spec: which algorithm sums over the replicas; see minidist.comm.
    gradient_repacking: in how many buffers all tensors travel that are summed together; 0: packed
        in none. It changes no bit, nor do the next two.
    agg_small_grads_max_bytes, agg_small_grads_max_group: tensors of at most so many bytes travel
        up to so many in a buffer; 0 bytes: none does.
    """

    local_parameter_device: str = "cpu"
    gradient_scale: str = "mean"
    all_reduce_spec: str = "copy"
    gradient_repacking: int = 0
    agg_small_grads_max_bytes: int = 0
    agg_small_grads_max_group: int = 10

    def __post_init__(self) -> None:
        _allow("local_parameter_device", self.local_parameter_device, PARAMETER_DEVICES)
        _allow("gradient_scale", self.gradient_scale, GRADIENT_SCALES)

    def communicator(self, devices: Sequence[Device]) -> comm.Communicator:
        """Return a communicator for these devices as the options want it."""
        packer = comm.packer(
            self.gradient_repacking, self.agg_small_grads_max_bytes, self.agg_small_grads_max_group
        )
        return comm.make(self.all_reduce_spec, devices, packer)


def independent(devices: Sequence[Device], options: PolicyOptions) -> VariableMgr:
    """Every replica trains a model of its own."""
    return VariableMgr(
        "independent",
        tuple(devices),
        place=EveryReplica(devices),
        read=ReadOwn,
        combine=Nothing(),
        apply=EveryReplicaApplies(),
        start=OwnValues(),
    )


def parameter_server(devices: Sequence[Device], options: PolicyOptions) -> VariableMgr:
    """One copy of each variable, fetched each step; the mean gradient is applied to it once."""
    place = OnHost(devices) if options.local_parameter_device == "cpu" else LeastLoaded(devices)
    combine = MeanAtVariable(options.communicator(devices), original=_original(options, "mean"))
    return VariableMgr(
        "parameter_server",
        tuple(devices),
        place=place,
        read=ReadFetched,
        combine=combine,
        apply=OnceApplies(),
        start=FromFirst(),
    )


def replicated(devices: Sequence[Device], options: PolicyOptions) -> VariableMgr:
    """A copy with every replica; gradients are all-reduced, and each replica updates its own."""
    combine = AllReduce(options.communicator(devices), original=_original(options, "sum"))
    return VariableMgr(
        "replicated",
        tuple(devices),
        place=EveryReplica(devices),
        read=ReadOwn,
        combine=combine,
        apply=EveryReplicaApplies(),
        start=FromFirst(),
    )


POLICIES: dict[str, Callable[[Sequence[Device], PolicyOptions], VariableMgr]] = {
    "independent": independent,
    "parameter_server": parameter_server,
    "replicated": replicated,
}


def make(variable_update: str, devices: Sequence[Device], options: PolicyOptions) -> VariableMgr:
    """Return the variable manager of that name; raises UsageError for a name there is not."""
    _allow("variable_update", variable_update, tuple(POLICIES))
    return POLICIES[variable_update](devices, options)


def _original(options: PolicyOptions, factor: str) -> str | None:
    return factor if options.gradient_scale == "original" else None


def _allow(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{option}={value!r} is not known; it may be {', '.join(allowed)}")
