"""Rows of a table by their numbers; the table's gradient keeps only those rows."""

from __future__ import annotations

from minidist.device.base import Array
from minidist.dtypes import kind
from minidist.errors import ShapeError
from minidist.indexed_slices import IndexedSlices, check_rows
from minidist.ops.convert import TensorLike, as_tensor, fit_device, floats
from minidist.ops.shape import cast, reshape
from minidist.tape import Gradient, record
from minidist.tensor import Tensor


def embedding(table: TensorLike, ids: TensorLike, sparse: bool = True) -> Tensor:
    """table[ids]: [rows, ...] and integers [...] -> [*ids.shape, *table.shape[1:]].

    The gradient of `table` is an IndexedSlices with a row for each id, or, not `sparse`, an array
    like the table: better where most rows are used each time.
    Raises ShapeError where the table has no rows or ids are no integers, UsageError (a ValueError)
    for an id outside 0 … rows−1.
    """
    table, ids = floats("embedding", table), as_tensor(ids)
    if not table.shape:
        raise ShapeError("embedding: the table has shape (); it needs rows")
    if kind(ids.dtype) not in "iu":
        raise ShapeError(
            f"embedding: ids of dtype {ids.dtype} and shape {ids.shape}; row numbers are integers"
        )
    fit_device("embedding", table, ids)
    check_rows("embedding", ids, table.shape[0])
    flat = cast(reshape(ids, (ids.size,)), "int64")  # a copy: whose the ids are may change them
    rows = table.shape[1:]
    ops, device = table.device.ops, table.device

    def backward(dy: Array, _: object) -> tuple[Gradient]:
        dy = ops.reshape(dy, (flat.size, *rows))
        if sparse:
            indices = Tensor(ops.copy(flat.array), device)
            return (IndexedSlices(Tensor(dy, device), indices, table.shape),)
        total = ops.full(table.shape, 0, dy.dtype)
        ops.scatter_add(total, flat.array, dy)
        return (total,)

    y = ops.reshape(ops.gather(table.array, flat.array), (*ids.shape, *rows))
    return record(y, (table,), backward)
