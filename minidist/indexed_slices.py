"""IndexedSlices: a tensor that is zero except in some rows, which are all that is kept.

The gradient of an embedding table is one: a batch touches few of its rows. Adding two of them puts
their rows one after the other, so a row may occur several times; it means the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.device.base import Device
from minidist.errors import ContextError, ShapeError, UsageError
from minidist.tensor import Tensor, to_device


class IndexedSlices:
    """Rows `values` [k, …] at the places `indices` [k] of a tensor of `dense_shape` [rows, …].

    Rows of one index are added up, in the order in which they stand. Like a Tensor it never
    changes. `+` with another one keeps it sparse, with a Tensor makes a Tensor; `*` takes a number.
    No tape records any of it: it is a gradient, and has none.
    Raises ShapeError where the shapes or dtypes do not fit, UsageError (a ValueError) for an index
    outside 0 … rows−1, ContextError for values and indices on different devices.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Tensor, indices: Tensor, dense_shape: Sequence[int]) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = tuple(int(length) for length in dense_shape)
        if not isinstance(values, Tensor) or not isinstance(indices, Tensor):
            raise TypeError("IndexedSlices takes its values and indices as Tensors")
        if indices.ndim != 1 or indices.dtype != "int64":
            raise ShapeError(
                f"IndexedSlices: indices are int64 of rank 1, not {indices.dtype}"
                f"{list(indices.shape)}"
            )
        if not self.dense_shape or values.shape != (len(indices), *self.dense_shape[1:]):
            raise ShapeError(
                f"IndexedSlices: {len(indices)} rows of a tensor {list(self.dense_shape)} cannot "
                f"have values of shape {list(values.shape)}"
            )
        if values.device is not indices.device:
            raise ContextError(
                f"IndexedSlices: the values are on {values.device.short} and the indices on "
                f"{indices.device.short}; bring them to one device"
            )
        check_rows("IndexedSlices", indices, self.dense_shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.dense_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def ndim(self) -> int:
        return len(self.dense_shape)

    @property
    def device(self) -> Device:
        return self.values.device

    def to_dense(self) -> Tensor:
        """Return the whole tensor: zeros, and on them each row in order."""
        ops = self.device.ops
        dense = ops.full(self.dense_shape, 0, self.dtype)
        ops.scatter_add(dense, self.indices.array, self.values.array)
        return Tensor(dense, self.device)

    def coalesced(self) -> IndexedSlices:
        """Return the same tensor with every index once, ascending; rows are added up in order."""
        ops = self.device.ops
        indices, places = ops.unique(self.indices.array)
        values = ops.full((len(indices), *self.dense_shape[1:]), 0, self.dtype)
        ops.scatter_add(values, places, self.values.array)
        return self._with(values, indices)

    def copy(self) -> IndexedSlices:
        """Return a copy that shares no memory with this one."""
        ops = self.device.ops
        return self._with(ops.copy(self.values.array), ops.copy(self.indices.array))

    def to(self, device: Device) -> IndexedSlices:
        """Return a copy on `device`, or this one if it is there."""
        if device is self.device:
            return self
        return IndexedSlices(
            to_device(self.values, device, "rows"),
            to_device(self.indices, device, "rows"),
            self.dense_shape,
        )

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the whole tensor in the host's memory."""
        return self.to_dense().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __add__(self, other: IndexedSlices | Tensor) -> Any:
        if isinstance(other, IndexedSlices):
            return concatenate([self, other])
        return self.to_dense() + other

    def __mul__(self, factor: float) -> IndexedSlices:
        ops = self.device.ops
        values = ops.multiply(self.values.array, ops.full((), factor, self.dtype))
        return self._with(values, self.indices.array)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return (
            f"<IndexedSlices {len(self.indices)} rows of {self.dtype}{list(self.dense_shape)} "
            f"on {self.device.short}>"
        )

    def _with(self, values: Any, indices: Any) -> IndexedSlices:
        device = self.device
        return IndexedSlices(Tensor(values, device), Tensor(indices, device), self.dense_shape)


def concatenate(parts: Sequence[IndexedSlices]) -> IndexedSlices:
    """Return the sum of several on the first one's device: their rows one after the other.

    Raises ShapeError where they are not of one dtype and shape.
    """
    first = parts[0]
    for part in parts[1:]:
        if (part.dtype, part.dense_shape) != (first.dtype, first.dense_shape):
            raise ShapeError(
                f"IndexedSlices: {first.dtype}{list(first.dense_shape)} and {part.dtype}"
                f"{list(part.dense_shape)} cannot be added up"
            )
    if len(parts) == 1:
        return first
    here = [part.to(first.device) for part in parts]
    ops = first.device.ops
    return first._with(
        ops.concatenate([part.values.array for part in here]),
        ops.concatenate([part.indices.array for part in here]),
    )


def check_rows(operation: str, indices: Tensor, rows: int) -> None:
    """Raise UsageError unless every index is one of a tensor's first axis, 0 … rows−1."""
    host = indices.numpy()
    if host.size and not (host.min() >= 0 and host.max() < rows):
        wrong = host.min() if host.min() < 0 else host.max()
        raise UsageError(f"{operation}: index {wrong} is not one of 0 … {rows - 1}")
