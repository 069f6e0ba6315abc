"""Flags of the policy: those of variable_mgr.PolicyOptions, by the same names, and which one."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.bench.flags.kinds import BOOLEAN, NARROW, POSITIVE, TEXT, choice, flag, whole
from minidist.variable_mgr import (
    CONSISTENCIES,
    GRADIENT_SCALES,
    PARAMETER_DEVICES,
    POLICIES,
)

ALL = "all"


@dataclass(frozen=True)
class Distribution:
    """How the copies of a variable are kept in step."""

    variable_update: str = flag(
        "replicated",
        choice(*POLICIES, ALL),
        "the policy; all runs every one in turn, staged and relaxed too, on the same data and "
        "start, and ends with a table; flags that do not fit a policy are left out for it",
    )
    local_parameter_device: str = flag(
        "cpu",
        choice(*PARAMETER_DEVICES),
        "where parameter_server keeps each variable: on the host, or on the least loaded of the "
        "devices (device and gpu mean the same)",
    )
    staged_vars: bool = flag(
        False,
        BOOLEAN,
        "replicas of parameter_server compute with the variables of one step before, whose copies "
        "were made meanwhile",
    )
    caching: bool = flag(
        False,
        BOOLEAN,
        "replicas of parameter_server fetch from copies made once a step, the small ones on the "
        "host, the large ones on the least loaded device",
    )
    variable_consistency: str = flag(
        "strong",
        choice(*CONSISTENCIES),
        "relaxed: replicated applies the gradients of one step before, summed meanwhile",
    )
    gradient_scale: str = flag(
        "mean",
        choice(*GRADIENT_SCALES),
        "mean over replicas under every policy, or the ancestors' mixture of sums and means",
    )
    all_reduce_spec: str = flag(
        "auto",
        TEXT,
        "the algorithms that sum over the replicas, as pscpu, xring#2 or pscpu:2k:xring",
    )
    hierarchical_copy: bool = flag(
        False, BOOLEAN, "the same as --all_reduce_spec=hierarchical_copy"
    )
    gradient_repacking: int = flag(
        0, whole(0, 10_000), "in how many buffers all gradients travel; 0: packed in none"
    )
    agg_small_grads_max_bytes: int = flag(
        0, whole(0), "gradients of at most so many bytes travel together; 0: none do"
    )
    agg_small_grads_max_group: int = flag(10, whole(1), "at most so many of them")
    compact_gradient_transfer: str | bool = flag(
        False, NARROW, "gradients travel in 16 bits and are summed in 32"
    )
    overlap: bool | None = flag(
        None,
        BOOLEAN,
        "gradients are summed during the backward pass; by default where a core is to spare",
    )
    bucket_cap_mb: float = flag(
        25.0, POSITIVE, "MiB of gradients that are summed at a time then, the first time 1"
    )
    concurrent: bool = flag(True, BOOLEAN, "replicas run at the same time, else in turns")
