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

from minidist import observe
from minidist.comm.row import Row, tell
from minidist.comm.scratch import Scratch
from minidist.device import Array, Device
from minidist.errors import UsageError
from minidist.kernels.reduce import offsets
from minidist.traffic import Outline, Places, Traffic

Kind = tuple[tuple[int, ...], Any]  # shape and dtype of a tensor


@dataclass(frozen=True)
class Buffer:
    """Tensors of a row, by their numbers, one behind the other, and how many pieces they go in."""

    members: tuple[int, ...]
    pieces: int = 1


class Packer(ABC):
    """Says which tensors share a buffer."""

    @abstractmethod
    def buffers(self, row: Sequence[Array] | Sequence[Outline]) -> list[Buffer]:
        """Return the buffers for a row, all members of one being of one dtype.

        Tensors that are in no buffer travel by themselves.
        """

    @contextmanager
    def packed(
        self, sources: Sequence[Row], destinations: Sequence[Row]
    ) -> Iterator[tuple[list[Row], list[Row]]]:
        """Pack rows for the length of a with statement, and unpack what was put into them.

        What it gives stands for the sources and the destinations: each source is packed into
        buffers on its device, and each destination unpacked from one on the device of the buffer's
        first tensor there, which is a source's where there is one.
        """
        buffers = self.buffers(sources[0])
        alone = sorted(set(range(len(sources[0]))).difference(*[b.members for b in buffers]))
        with Scratch() as scratch:
            at: dict[tuple[Device, Buffer], Array] = {}  # the first buffer on each device
            rows = []
            for source in sources:
                flats = []
                for buffer in buffers:
                    part = source.part(buffer.members)
                    flats.append(_flat(scratch, part))
                    if observe.counting:
                        tell([part.devices[0]] * len(part), [], [part])
                    at.setdefault((part.devices[0], buffer), flats[-1])
                    for place, array in zip(_places(flats[-1], part), part, strict=True):
                        part.devices[0].copy(place, array)
                homes = [source.devices[buffer.members[0]] for buffer in buffers]
                rows.append(Row(flats, homes))
            own = []
            for destination in destinations:
                homes = [destination.devices[buffer.members[0]] for buffer in buffers]
                for home, buffer in zip(homes, buffers, strict=True):
                    if (home, buffer) not in at:
                        at[home, buffer] = _flat(scratch, destination.part(buffer.members))
                flats = [at[each] for each in zip(homes, buffers, strict=True)]
                own.append(Row(flats, homes))
            yield (
                [_row(buffers, *both, alone) for both in zip(rows, sources, strict=True)],
                [_row(buffers, *both, alone) for both in zip(own, destinations, strict=True)],
            )
            for flats, destination in zip(own, destinations, strict=True):
                for flat, home, buffer in zip(flats, flats.devices, buffers, strict=True):
                    part = destination.part(buffer.members)
                    if observe.counting:
                        tell([home] * len(part), [part], [])
                    for place, array in zip(_places(flat, part), part, strict=True):
                        home.copy(array, place)

    def predicted_bytes(
        self, traffic: Traffic, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> tuple[list[Outline], list[list[Device]]]:
        """Return the outlines of what travels for a row, and its destinations' devices.

        What goes from a destination's buffer to tensors on other devices is added to `traffic`.
        """
        buffers = self.buffers(tensors)
        alone = sorted(set(range(len(tensors))).difference(*[b.members for b in buffers]))
        pieces: list[Outline] = []
        wanted: list[list[Device]] = [[] for _ in destinations]
        for buffer in buffers:
            total, dtype = (
                sum(tensors[i].size for i in buffer.members),
                tensors[buffer.members[0]][1],
            )
            length = total // buffer.pieces
            pieces += [Outline(length, dtype)] * (buffer.pieces - 1)
            pieces.append(Outline(total - length * (buffer.pieces - 1), dtype))
            for places, ways in zip(destinations, wanted, strict=True):
                home = places[buffer.members[0]]
                ways += [home] * buffer.pieces
                for i in buffer.members:
                    traffic.go(home, places[i], tensors[i].nbytes)
        for places, ways in zip(destinations, wanted, strict=True):
            ways += [places[i] for i in alone]
        return pieces + [tensors[i] for i in alone], wanted


class Packs(Packer):
    """All tensors in one buffer, cut in `gradient_repacking` of equal length.

    The last has the remainder. Tensors of each dtype have a buffer of their own.
    """

    def __init__(self, gradient_repacking: int) -> None:
        if gradient_repacking < 1:
            raise UsageError(f"gradient_repacking={gradient_repacking!r} must be at least 1")
        self._pieces = gradient_repacking

    def buffers(self, row: Sequence[Array] | Sequence[Outline]) -> list[Buffer]:
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

    def buffers(self, row: Sequence[Array] | Sequence[Outline]) -> list[Buffer]:
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
    gradient_repacking: int = 0,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
) -> Packer | None:
    """Return the packer that the options ask for; with 0 packs and 0 bytes there is none.

    Raises UsageError (a ValueError) for negative numbers, and where both are asked for.
    """
    if gradient_repacking < 0 or agg_small_grads_max_bytes < 0:
        raise UsageError(
            f"gradient_repacking={gradient_repacking!r} and agg_small_grads_max_bytes="
            f"{agg_small_grads_max_bytes!r} must not be negative; 0 means no packing"
        )
    if gradient_repacking and agg_small_grads_max_bytes:
        raise UsageError(
            f"gradient_repacking={gradient_repacking} packs all tensors and "
            f"agg_small_grads_max_bytes={agg_small_grads_max_bytes} only the small ones; give one "
            "of them"
        )
    if gradient_repacking:
        return Packs(gradient_repacking)
    if agg_small_grads_max_bytes:
        return SmallTensors(agg_small_grads_max_bytes, agg_small_grads_max_group)
    return None


def allocate_row(places: Sequence[tuple[Device, Kind]]) -> Row:
    """Return an array for each (device, (shape, dtype)), not initialised.

    All of one device and dtype share one bucket, in which each is 64-byte aligned.
    """
    if len(places) == 1:
        ((device, (shape, dtype)),) = places
        return Row([device.allocate(shape, dtype)], [device])
    row = Row([None] * len(places), [device for device, _ in places])
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


def _flat(scratch: Scratch, row: Row) -> Array:
    """Return a buffer that has room for a row, on the device of its first array."""
    return scratch.flat(row.devices[0], sum(array.size for array in row), row[0].dtype)


def _places(flat: Array, arrays: Sequence[Array]) -> Iterator[Array]:
    """Give each array's part of a buffer, in the array's shape."""
    start = 0
    for array in arrays:
        yield flat[start : start + array.size].reshape(array.shape)
        start += array.size


def _row(buffers: Sequence[Buffer], flats: Row, row: Row, alone: Sequence[int]) -> Row:
    """Return what travels: the pieces of the buffers, then the tensors that are in none."""
    pieces, homes = [], []
    for buffer, flat, home in zip(buffers, flats, flats.devices, strict=True):
        pieces += _cut(flat, buffer)
        homes += [home] * buffer.pieces
    rest = row.part(alone)
    return Row(pieces + rest, [*homes, *rest.devices])


def _cut(flat: Array, buffer: Buffer) -> list[Array]:
    length = len(flat) // buffer.pieces
    starts = [k * length for k in range(buffer.pieces)]
    return [flat[a:b] for a, b in zip(starts, [*starts[1:], len(flat)], strict=True)]
