"""Row: what one replica brings to a sum, or one destination gets: an array for each tensor.

A row knows in whose memory each array is, so that who reads or writes one can tell which bytes go
from device to device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from minidist import observe
from minidist.device import Array, Device


class Row(list[Array]):
    """Arrays, and the `devices` that they are on, one for each."""

    __slots__ = ("devices",)

    def __init__(self, arrays: Iterable[Array], devices: Sequence[Device]) -> None:
        list.__init__(self, arrays)
        self.devices = tuple(devices)

    @classmethod
    def on(cls, device: Device, arrays: Sequence[Array]) -> Row:
        """Return a row of arrays that are all on one device."""
        return cls(arrays, (device,) * len(arrays))

    def part(self, members: Sequence[int]) -> Row:
        """Return only some of the arrays."""
        return Row([self[i] for i in members], [self.devices[i] for i in members])


def placed(rows: Sequence[Sequence[Array]], devices: Sequence[Device]) -> Sequence[Row]:
    """Return rows that know their devices: one that does not is on the device of its number."""
    for row in rows:
        if type(row) is not Row:
            break
    else:
        return rows  # type: ignore[return-value]
    return [
        row if isinstance(row, Row) else Row.on(devices[i % len(devices)], row)
        for i, row in enumerate(rows)
    ]


def columns(rows: Sequence[Row], members: Sequence[int]) -> list[Row]:
    """Return only some of each row's arrays."""
    return [row.part(members) for row in rows]


def kinds(row: Row) -> str:
    """Say what is in a row, for a meeting."""
    return ", ".join([f"{_name(array.dtype)}{list(array.shape)}" for array in row])


@lru_cache
def _name(dtype: Any) -> str:
    return str(dtype)


def tell(by: Sequence[Device], destinations: Sequence[Row], sources: Sequence[Row]) -> None:
    """Tell of one pass over memory.

    Array t of every source is read, and that of every destination written, by the device by[t].
    """
    moved: Counter[tuple[str, str]] = Counter()
    for rows, reads in ((sources, True), (destinations, False)):
        for row in rows:
            for home, device, nbytes in _ways(row, by):
                ends = (home.short, device.short) if reads else (device.short, home.short)
                moved[ends] += nbytes
    for (source, destination), nbytes in moved.items():
        observe.moved(source, destination, nbytes, "sums")


def _ways(row: Row, by: Sequence[Device]) -> list[tuple[Device, Device, int]]:
    """Return between which devices how many bytes go, the same two once where all are."""
    homes, count = row.devices, len(row)
    if count and homes.count(homes[0]) == by.count(by[0]) == count:
        if homes[0] is by[0]:
            return []
        return [(homes[0], by[0], sum([array.nbytes for array in row]))]
    return [
        (home, device, array.nbytes)
        for home, device, array in zip(homes, by, row, strict=True)
        if home is not device
    ]
