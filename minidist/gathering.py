"""Gathering: one tensor from what the replicas have, one part behind the other in replica order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minidist import observe
from minidist.comm.sharing import share
from minidist.destinations import as_placeable
from minidist.errors import ShapeError, UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.structure import map_leaves
from minidist.tensor import Tensor
from minidist.values import Mirrored, PerReplica

if TYPE_CHECKING:
    from minidist.strategy import Strategy


def gather(strategy: Strategy, value: Any, axis: int) -> Any:
    """Return each leaf of a structure in one piece; see Strategy.gather."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"gather: axis must be an int, not {axis!r}")
    return map_leaves(lambda leaf: _gather(strategy, leaf, axis), value)


def _gather(strategy: Strategy, leaf: Any, axis: int) -> Tensor:
    site, replicas = strategy.site, strategy.num_replicas
    if not isinstance(leaf, PerReplica):
        if len(strategy.devices) > 1 or isinstance(leaf, Mirrored):
            raise UsageError(
                f"gather: {leaf!r} is the same in all {replicas} replicas, so it is not clear how "
                "often it is meant; gather a per-replica value"
            )
        leaf = PerReplica(None, [leaf])
    parts = [_part(part, axis, site.first + i) for i, part in enumerate(leaf.values)]
    device = leaf.devices[0] if leaf.devices else parts[0].device
    if site.peers.count > 1:
        what = f"gather along axis {axis}"
        _, theirs = share(site.peers, what, [part.numpy() for part in parts])
        arrays = [array for each in theirs for array in each]
        parts = [Tensor(device.copy_in(array), device) for array in arrays]
    first = parts[0]
    along = axis % first.ndim
    for replica, part in enumerate(parts):
        if _rest(part, along) != _rest(first, along):
            raise ShapeError(
                f"gather: replica 0 has {first.dtype}{list(first.shape)} and replica {replica} has "
                f"{part.dtype}{list(part.shape)}, which differ in more than axis {axis}"
            )
    if len(parts) == 1:
        return first
    length = sum(part.shape[along] for part in parts)
    shape = (*first.shape[:along], length, *first.shape[along + 1 :])
    whole = device.allocate(shape, first.dtype)
    start = 0
    for part in parts:
        end = start + part.shape[along]
        device.copy(whole[(slice(None),) * along + (slice(start, end),)], part.array)
        if observe.counting:
            observe.moved(part.device.short, device.short, part.array.nbytes, "values")
        start = end
    return Tensor(whole, device)


def _part(part: Any, axis: int, replica: int) -> Tensor:
    tensor = as_placeable(part, "gather")
    if isinstance(tensor, IndexedSlices):
        raise UsageError("gather: IndexedSlices have no parts that follow each other; reduce them")
    if not -tensor.ndim <= axis < tensor.ndim:
        raise UsageError(
            f"gather: axis {axis} is out of range for the value of replica {replica}, which has "
            f"shape {list(tensor.shape)}"
        )
    return tensor


def _rest(part: Tensor, along: int) -> Any:
    return part.dtype, part.ndim, part.shape[:along], part.shape[along + 1 :]
