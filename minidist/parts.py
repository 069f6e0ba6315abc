"""Parts: what each replica has of a value that is to be reduced, also replicas of other workers.

Each worker looks at what its own replicas have, and tells the others; so all know the kinds of all
parts, and come to the same conclusions. The values stay where they are, but for Python's numbers.

Of what is no per-replica value it is not always clear whose it is. All workers with several
replicas have found one object in them: is it the same in all workers? If it is, to the last bit, it
is one value for all replicas; else each worker's is what each of its replicas has. Of a worker with
one replica it is this replica's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist import dtypes, ops
from minidist.comm.peers import Peers
from minidist.comm.sharing import agree
from minidist.destinations import is_number
from minidist.dtypes import as_dtype
from minidist.errors import UsageError
from minidist.indexed_slices import IndexedSlices
from minidist.tensor import Tensor

NUMBER, DENSE, SPARSE = "a number", "a tensor", "IndexedSlices"
NOT, PERHAPS, SURELY = range(3)  # whether a value is one for all replicas
DIGEST = 8  # bytes


@dataclass(slots=True)
class Part:
    """What one replica has.

    value: None where it is another worker's, unless it is a number. dtype: of what was given.
    shape: of what is left of it. length: how many elements were added up on an axis. narrow: the
    dtype of 16 bits in which the result is wanted, where that is not the value's.
    """

    kind: str
    value: Any
    dtype: Any = None
    shape: tuple[int, ...] = ()
    length: int = 1
    narrow: Any = None

    def made_dense(self) -> Part:
        """Return it as a tensor."""
        if self.kind == DENSE:
            return self
        value = None if self.value is None else self.value.to_dense()
        return Part(DENSE, value, self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.kind == DENSE else self.kind


def parts_of(values: Sequence[Any], axis: int | None) -> list[Part]:
    """Return the parts that these Tensors, IndexedSlices and numbers are, summed over an axis.

    Raises UsageError for an axis that one of them has not.
    """
    if axis is None:
        parts = [_part(value) for value in values]
        if all(part.dtype == bool for part in parts):
            for part in parts:
                part.value = _counted(part.value)
        return parts
    if any(map(is_number, values)):
        raise UsageError(f"reduce: axis {axis} is out of range for a number: {list(values)!r}")
    tensors = [each.to_dense() if isinstance(each, IndexedSlices) else each for each in values]
    given = [tensor.dtype for tensor in tensors]
    lengths = [_length(tensor, axis) for tensor in tensors]
    narrow = None
    if all(tensor.dtype == bool for tensor in tensors):
        tensors = [_counted(tensor) for tensor in tensors]
    elif dtypes.is_narrow(given[0]) and len(set(given)) == 1:
        narrow = given[0]  # and float32 until all is added up
        tensors = [ops.cast(tensor, "float32") for tensor in tensors]
    sums = [ops.reduce_sum(tensor, axis) for tensor in tensors]
    return [
        Part(DENSE, total, dtype, total.shape, length, narrow)
        for total, dtype, length in zip(sums, given, lengths, strict=True)
    ]


def _part(value: Any) -> Part:
    if isinstance(value, Tensor):
        return Part(DENSE, value, value.dtype, value.shape)
    if isinstance(value, IndexedSlices):
        return Part(SPARSE, value, value.dtype, value.shape)
    return Part(NUMBER, value)


def _counted(truths: Tensor) -> Tensor:
    """Return truth values as 0 and 1."""
    return ops.cast(truths, "int64")


def _length(part: Tensor, axis: int) -> int:
    if not -part.ndim <= axis < part.ndim:
        raise UsageError(
            f"reduce: axis {axis} is out of range for a value of shape {list(part.shape)}"
        )
    return part.shape[axis]


def meet(
    peers: Peers,
    counts: Sequence[int],
    details: Sequence[str],
    leaves: Sequence[tuple[int, Sequence[Part]]],
) -> list[tuple[bool, list[Part]]]:
    """Return for each leaf whether it is one value for all replicas, and its parts.

    counts: how many replicas each worker has. details: what all must do alike, in words. leaves:
    NOT and this worker's parts, or PERHAPS or SURELY and the only one.
    """
    brought = json.dumps([_told(same, parts) for same, parts in leaves]).encode()
    details = [*details, f"{len(leaves)} values"]
    every = [json.loads(each) for each in agree(peers, "reduce", details, brought)]
    found = []
    for i, (_, parts) in enumerate(leaves):
        told = [each[i] for each in every]
        if all(state == SURELY for state, *_ in told):
            found.append((True, list(parts[:1])))
            continue
        alike = all(state != NOT and digest == told[0][1] for state, digest, _ in told)
        if alike and any(count > 1 for count in counts):
            found.append((True, list(parts[:1])))
            continue
        whole: list[Part] = []
        for peer, (count, (state, _, outlines)) in enumerate(zip(counts, told, strict=True)):
            here = list(parts) if peer == peers.me else [_heard(each) for each in outlines]
            whole += here if state == NOT else here[:1] * count
        found.append((False, whole))
    return found


def _told(same: int, parts: Sequence[Part]) -> list[Any]:
    outlines = []
    for part in parts:
        value = part.value if part.kind == NUMBER else None
        if value is not None and not isinstance(value, bool | int | float):
            raise UsageError(
                f"reduce: {value!r} is a {type(value).__name__}, which cannot be told to other "
                "processes; make it an int, a float or a tensor"
            )
        narrow = part.narrow and str(part.narrow)
        outlines.append([part.kind, value, str(part.dtype), part.shape, part.length, narrow])
    return [same, _digest(parts[0]) if same == PERHAPS else "", outlines]


def _heard(outline: Sequence[Any]) -> Part:
    kind, value, dtype, shape, length, narrow = outline
    if kind == NUMBER:
        return Part(NUMBER, value)
    return Part(kind, None, as_dtype(dtype), tuple(shape), length, narrow and as_dtype(narrow))


def _digest(part: Part) -> str:
    if part.kind == NUMBER:
        return repr(part.value)
    tensors = [part.value] if part.kind == DENSE else [part.value.values, part.value.indices]
    digest = hashlib.blake2b(digest_size=DIGEST)
    for tensor in tensors:
        digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return digest.hexdigest()
