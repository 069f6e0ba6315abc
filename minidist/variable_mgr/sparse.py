"""Sparse: gradients of which only some rows are there, summed over all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.peers import Peers
from minidist.comm.sharing import share
from minidist.device import Device
from minidist.indexed_slices import IndexedSlices, concatenate
from minidist.tensor import Tensor
from minidist.variable import Variable


def rows_of_all(
    peers: Peers,
    device: Device,
    variables: Sequence[Variable],
    brought: Sequence[Sequence[IndexedSlices | None]],
) -> list[list[IndexedSlices | None]]:
    """Return for each variable what each replica, also of other ranks, has of it."""
    if peers.count == 1:
        return [list(parts) for parts in zip(*brought, strict=True)]
    there = bytes(part is not None for row in brought for part in row)
    arrays = []
    for part in (part for row in brought for part in row if part is not None):
        arrays += [part.values.numpy(), part.indices.numpy()]
    what = "sum rows of sparse gradients"
    words, theirs = share(peers, what, arrays, brought=there, kind="rows")
    columns: list[list[IndexedSlices | None]] = [[] for _ in variables]
    for marks, given in zip(words, map(iter, theirs), strict=True):
        for k, is_there in enumerate(marks):
            i = k % len(variables)
            shape = variables[i].shape
            if not is_there:
                columns[i].append(None)
                continue
            values = Tensor(device.copy_in(next(given)), device)
            indices = Tensor(device.copy_in(next(given)), device)
            columns[i].append(IndexedSlices(values, indices, shape))
    return columns


def sum_rows(
    parts: Sequence[IndexedSlices | None], weights: Sequence[float] | None
) -> IndexedSlices:
    """Return Σ w_i·x_i with each index once; each part has an index at most once."""
    if weights is not None:
        parts = [part if part is None else part * w for part, w in zip(parts, weights, strict=True)]
    there = [part for part in parts if part is not None]
    return there[0] if len(there) == 1 else concatenate(there).coalesced()
