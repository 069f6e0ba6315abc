"""reduce.pyx on a GPU: sums over replicas, casts, packing, and what is asked of all tensors.

Arguments and bits are those of the CPU's verbs (but for subnormal numbers, which CuPy's compiler
takes for 0); what is asked of tensors is answered on the GPU, so that nobody has to wait for it. A
call is one launch for all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.kernels.grid import (
    THREADS,
    Array,
    Machine,
    Table,
    Tensors,
    blocks,
    check,
    launch,
    pointers,
    table,
    wide,
)
from minidist.kernels.source import Module


def sum(
    machine: Machine,
    destinations: Sequence[Tensors],
    sources: Sequence[Tensors],
    *,
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
) -> None:
    """Store destinations[d][t] = (((w0 s0[t] + w1 s1[t]) + w2 s2[t]) ...) scale, in replica order.

    The weights are 1 unless given. A destination may be the very same array as a source. Sources of
    16 bits are added up in float32; their destinations are float32, or of the sources' dtype and
    rounded to once. Both may lie on other GPUs whose memory this one can reach.
    """
    if not destinations or not sources:
        raise ValueError(
            f"sum: needs a destination and a source, got {len(destinations)} destinations "
            f"and {len(sources)} sources"
        )
    if weights is None:
        weights = [1.0] * len(sources)
    if len(weights) != len(sources):
        raise ValueError(f"sum: {len(weights)} weights for {len(sources)} sources")
    if not destinations[0] or not sources[0]:
        return
    to, dtype = destinations[0][0].dtype, sources[0][0].dtype
    if to != dtype and not (to == np.float32 and dtype.itemsize == 2):
        raise TypeError(
            f"sum: destinations of {to.name} do not take sums of {dtype.name}; give them the "
            "sources' dtype, or float32 for those of 16 bits"
        )
    columns = {f"destinations[{d}]": tensors for d, tensors in enumerate(destinations)}
    columns |= {f"sources[{r}]": tensors for r, tensors in enumerate(sources)}
    types = [to] * len(destinations) + [dtype] * len(sources)
    number = wide(dtype.name).type
    tensors = table(machine, "sum", columns, types)
    factors = machine.constant(np.array(weights, number))
    arguments = np.int32(len(destinations)), *pointers(machine, factors), number(scale)
    tensors.launch(_module(dtype, to), "sum", *arguments)


def cast(machine: Machine, destinations: Tensors, sources: Tensors) -> None:
    """Convert each source into the destination of its number, between any two types of float.

    The nearest number is taken, of two equally near the even one. All destinations are of one
    dtype, and all sources.
    """
    columns = {"destinations": destinations, "sources": sources}
    if not destinations or not sources:
        table(machine, "cast", columns, [np.dtype(np.float32)] * 2)
        return
    to, dtype = destinations[0].dtype, sources[0].dtype
    table(machine, "cast", columns, [to, dtype]).launch(_module(dtype, to), "cast")


def _module(dtype: np.dtype[Any], to: np.dtype[Any]) -> Module:
    return Module("reduce", dtype.name, "" if to == dtype else to.name)


def pack(machine: Machine, flat: Array, tensors: Tensors, offsets: Sequence[int]) -> None:
    """Copy each tensor to its offset (in elements) in `flat`; what lies between stays as it is."""
    _copy(machine, "pack", flat, tensors, offsets)


def unpack(machine: Machine, tensors: Tensors, flat: Array, offsets: Sequence[int]) -> None:
    """Copy each tensor from its offset (in elements) in `flat`: the way back from `pack`."""
    _copy(machine, "unpack", flat, tensors, offsets)


def _copy(
    machine: Machine, verb: str, flat: Array, tensors: Tensors, offsets: Sequence[int]
) -> None:
    dtype = flat.dtype
    check(verb, "flat", flat, dtype, flat.size)
    if len(tensors) != len(offsets):
        raise ValueError(f"{verb}: {len(tensors)} tensors, but {len(offsets)} offsets")
    base, room = machine.address(flat), flat.size
    addresses = np.empty((len(tensors), 2), np.uint64)
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        check(verb, f"tensors[{i}]", tensor, dtype, tensor.size)
        if not 0 <= offset <= room - tensor.size:
            raise ValueError(
                f"{verb}: tensors[{i}] of {tensor.size} elements at offset {offset} does not "
                f"fit into flat, which has {room}"
            )
        addresses[i] = base + offset * dtype.itemsize, machine.address(tensor)
    if verb == "unpack":
        addresses = addresses[:, ::-1]
    rows = Table(machine, addresses, [tensor.size for tensor in tensors])
    rows.launch(Module("reduce", dtype.name), "copy")


def first_nonfinite(machine: Machine, tensors: Tensors) -> Array:
    """Return int32 [1]: the index of the first tensor with a NaN or an infinity, or their number.

    They are all of one dtype.
    """
    found = machine.full((1,), len(tensors), np.int32)
    if tensors:
        dtype = tensors[0].dtype
        rows = table(machine, "first_nonfinite", {"tensors": tensors}, [dtype])
        rows.launch(Module("reduce", dtype.name), "first_nonfinite", *pointers(machine, found))
    return found


def sum_squares(machine: Machine, tensors: Tensors) -> Array:
    """Return float64 [1]: the sum of the squares of all elements, in the CPU's order.

    They are all of one dtype.
    """
    total = machine.full((1,), 0, np.float64)
    if not tensors:
        return total
    dtype = tensors[0].dtype
    rows = table(machine, "sum_squares", {"tensors": tensors}, [dtype])
    if rows.chunks == 0:
        return total
    module = Module("reduce", dtype.name)
    sums = machine.empty((rows.chunks,), np.float64)
    places = pointers(machine, sums, total)
    each = THREADS // 16  # chunks that a block does at once, with MD_LANES threads each
    grid = blocks(rows.chunks, each)
    launch(machine, module, "square_chunks", grid, rows.struct, places[0])
    launch(machine, module, "add_in_order", (1, 1), np.int64(rows.chunks), *places)
    return total
