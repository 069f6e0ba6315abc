"""Row: what one replica brings to a sum, or one destination gets: an array for each tensor.

A row knows in whose memory each array is, so that who reads or writes one can tell which bytes go
from device to device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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


def tell(by: Sequence[Device], destinations: Sequence[Row], sources: Sequence[Row]) -> None:
    """Tell of one pass over memory.

    Array t of every source is read, and that of every destination written, by the device by[t].
    """
    moved: Counter[tuple[str, str]] = Counter()
    by = tuple(by)
    for rows, reads in ((sources, True), (destinations, False)):
        for row in rows:
            if row.devices == by:
                continue
            for device, home, array in zip(by, row.devices, row, strict=True):
                ends = (home.short, device.short) if reads else (device.short, home.short)
                moved[ends] += array.nbytes
    for (source, destination), nbytes in moved.items():
        observe.moved(source, destination, nbytes, "sums")
