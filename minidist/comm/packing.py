"""Packing: many tensors in few buffers, so that what goes over a wire goes in few messages.

A packer plans which tensors of a row lie one behind the other in which buffer. Sums are taken
element by element, so what comes out has the same bits, however it was packed.

    row            [a a a a] [b b] [c] [d d d d d d d]
    Packs(3)       [a a a a|b b c d|d d d d d d]         one buffer, cut in three
    SmallTensors   [b b c] [a a a a] [d d d d d d d]     with at most two elements to be small
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from minidist.comm.scratch import Row, Scratch
from minidist.device import Array, Device
from minidist.errors import UsageError
from minidist.kernels.reduce import offsets

Kind = tuple[tuple[int, ...], Any]  # shape and dtype of a tensor


@dataclass(frozen=True)
class Buffer:
    """Tensors of a row, by their numbers, one behind the other, and how many pieces they go in."""

    members: tuple[int, ...]
    pieces: int = 1


class Packer(ABC):
    """Says which tensors share a buffer."""

    @abstractmethod
    def buffers(self, row: Row) -> list[Buffer]:
        """Return the buffers for a row, all members of one being of one dtype.

        Tensors that are in no buffer travel by themselves.
        """

    @contextmanager
    def packed(
        self, sources: Sequence[Row], destinations: Sequence[Row], devices: Sequence[Device]
    ) -> Iterator[tuple[list[Row], list[Row]]]:
        """Pack rows for the length of a with statement, and unpack what was put into them.

        What it gives stands for the sources and the destinations: source i is packed into buffers
        leased from device i, and destination i is unpacked from these, modulo how many there are.
        """
        buffers = self.buffers(sources[0])
        alone = sorted(set(range(len(sources[0]))).difference(*[b.members for b in buffers]))
        with Scratch() as scratch:
            flats: list[list[Array]] = []
            for replica, source in enumerate(sources):
                device = devices[replica % len(devices)]
                flats.append([])
                for buffer in buffers:
                    arrays = [source[i] for i in buffer.members]
                    flat = scratch.flat(device, sum(a.size for a in arrays), arrays[0].dtype)
                    flats[-1].append(flat)
                    for place, array in zip(_places(flat, arrays), arrays, strict=True):
                        device.copy(place, array)
            own = [flats[i % len(flats)] for i in range(len(destinations))]
            yield (
                [_row(buffers, *both, alone) for both in zip(flats, sources, strict=True)],
                [_row(buffers, *both, alone) for both in zip(own, destinations, strict=True)],
            )
            for i, destination in enumerate(destinations):
                device = devices[i % len(devices)]
                for flat, buffer in zip(own[i], buffers, strict=True):
                    arrays = [destination[k] for k in buffer.members]
                    for place, array in zip(_places(flat, arrays), arrays, strict=True):
                        device.copy(array, place)


class Packs(Packer):
    """All tensors in one buffer, cut in `num_packs` of equal length; the last has the remainder.

    Tensors of each dtype have a buffer of their own.
    """

    def __init__(self, num_packs: int) -> None:
        if num_packs < 1:
            raise UsageError(f"num_packs={num_packs!r} must be at least 1")
        self._pieces = num_packs

    def buffers(self, row: Row) -> list[Buffer]:
        by_dtype: dict[Any, list[int]] = {}
        for i, array in enumerate(row):
            by_dtype.setdefault(array.dtype, []).append(i)
        return [Buffer(tuple(members), self._pieces) for members in by_dtype.values()]


class SmallTensors(Packer):
    """Tensors of at most `max_bytes` that follow each other, up to `max_group` in a buffer."""

    def __init__(self, max_bytes: int, max_group: int) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_group", max_group)):
            if value < 1:
                raise UsageError(f"agg_small_grads_{name}={value!r} must be greater than 0")
        self._max_bytes, self._max_group = max_bytes, max_group

    def buffers(self, row: Row) -> list[Buffer]:
        groups: list[list[int]] = []
        for i, array in enumerate(row):
            if array.nbytes > self._max_bytes:
                continue
            last = groups[-1] if groups else []
            follows = last and last[-1] == i - 1 and row[i - 1].dtype == array.dtype
            if follows and len(last) < self._max_group:
                last.append(i)
            else:
                groups.append([i])
        return [Buffer(tuple(group)) for group in groups if len(group) > 1]


def packer(
    num_packs: int = 0, agg_small_grads_max_bytes: int = 0, agg_small_grads_max_group: int = 10
) -> Packer | None:
    """Return the packer that the options ask for; with 0 packs and 0 bytes there is none.

    Raises UsageError (a ValueError) for negative numbers, and where both are asked for.
    """
    if num_packs < 0 or agg_small_grads_max_bytes < 0:
        raise UsageError(
            f"num_packs={num_packs!r} and agg_small_grads_max_bytes={agg_small_grads_max_bytes!r} "
            "must not be negative; 0 means no packing"
        )
    if num_packs and agg_small_grads_max_bytes:
        raise UsageError(
            f"num_packs={num_packs} packs all tensors and agg_small_grads_max_bytes="
            f"{agg_small_grads_max_bytes} only the small ones; give one of them"
        )
    if num_packs:
        return Packs(num_packs)
    if agg_small_grads_max_bytes:
        return SmallTensors(agg_small_grads_max_bytes, agg_small_grads_max_group)
    return None


def allocate_row(places: Sequence[tuple[Device, Kind]]) -> list[Array]:
    """Return an array for each (device, (shape, dtype)), not initialised.

    All of one device and dtype share one bucket, in which each is 64-byte aligned.
    """
    if len(places) == 1:
        ((device, (shape, dtype)),) = places
        return [device.allocate(shape, dtype)]
    row: list[Any] = [None] * len(places)
    by_bucket: dict[tuple[Device, Any], list[int]] = {}
    for i, (device, (_, dtype)) in enumerate(places):
        by_bucket.setdefault((device, dtype), []).append(i)
    for (device, dtype), members in by_bucket.items():
        shapes = [places[i][1][0] for i in members]
        starts, total = offsets(shapes, dtype.itemsize)
        bucket = device.allocate((total,), dtype)
        for i, start, shape in zip(members, starts, shapes, strict=True):
            row[i] = bucket[start : start + prod(shape)].reshape(shape)
    return row


def _places(flat: Array, arrays: Sequence[Array]) -> Iterator[Array]:
    """Give each array's part of a buffer, in the array's shape."""
    start = 0
    for array in arrays:
        yield flat[start : start + array.size].reshape(array.shape)
        start += array.size


def _row(buffers: Sequence[Buffer], flats: Row, row: Row, alone: Sequence[int]) -> Row:
    """Return what travels: the pieces of the buffers, then the tensors that are in none."""
    pieces = [piece for b, flat in zip(buffers, flats, strict=True) for piece in _cut(flat, b)]
    return pieces + [row[i] for i in alone]


def _cut(flat: Array, buffer: Buffer) -> list[Array]:
    length = len(flat) // buffer.pieces
    starts = [k * length for k in range(buffer.pieces)]
    return [flat[a:b] for a, b in zip(starts, [*starts[1:], len(flat)], strict=True)]
