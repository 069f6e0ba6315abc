"""NcclPassing: rows as they are, from one rank of NCCL to others, as bytes.

broadcast    ncclBroadcast of the root's row; teams share what their rank gets
all_gather   ncclSend of every row to the first rank of each other process, and ncclRecv there,
             so that rows may differ in number, shapes and dtypes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist import observe
from minidist.comm.base import copy_row
from minidist.comm.nccl_library import TYPES
from minidist.comm.nccl_ranks import NcclRanks
from minidist.comm.nccl_teams import Teams, placed_on
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.device import Device
from minidist.dtypes import as_dtype
from minidist.errors import ShapeError

BYTE = TYPES["uint8"]


def broadcast(
    ranks: NcclRanks, teams: Teams, rows: Sequence[Row], root: int, source: Row | None
) -> None:
    """Copy a row to those of all replicas. root: its rank; source: the row, if it is here."""
    flat = [_bytes(row) for row in rows]
    with Scratch() as scratch:
        places = [
            placed_on(speaker, row, [row], scratch)
            for speaker, row in zip(teams.speakers, teams.first_rows(flat), strict=True)
        ]
        if source is not None:
            _put(places[root - ranks.first], _bytes(source))

        def give(rank: int, handle: Any, stream: int) -> None:
            for array in places[rank]:
                at = _at(array)
                ranks.nccl.broadcast(handle, at, at, array.size, BYTE, root, stream)

        tell(teams.speakers, places, "values")
        ranks.give(f"broadcast of {len(places[0])} tensors", places, places, give)
        wanted = zip(rows, flat, strict=True)
        teams.hand_out(places, [one for row, one in wanted if row is not source])


def outlines(rows: Sequence[Row]) -> bytes:
    """Return what others must know of rows to make room for them."""
    kinds = [[(array.shape, str(array.dtype)) for array in row] for row in rows]
    return json.dumps(kinds).encode()


def made(device: Device, outlined: bytes) -> list[Row]:
    """Return rows that are as somebody else's."""
    return [
        Row.on(device, [device.allocate(shape, as_dtype(dtype)) for shape, dtype in row])
        for row in json.loads(outlined)
    ]


def all_gather(ranks: NcclRanks, teams: Teams, every: Sequence[Sequence[Row]], mine: int) -> None:
    """Fill the rows of other processes; `every` has those of each, `mine` its number here."""
    heads = list(accumulate(ranks.counts, initial=0))[:-1]  # the first rank of each process
    with Scratch() as scratch:
        sent: list[list[Any]] = [[] for _ in teams.speakers]
        for row, number in zip(map(_bytes, every[mine]), teams.of, strict=True):
            place = placed_on(teams.speakers[number], row, [row], scratch)
            _put(place, row)
            sent[number] += place
        arriving = list(_arriving(ranks, every, mine))

        def give(rank: int, handle: Any, stream: int) -> None:
            for head in heads[:mine] + heads[mine + 1 :]:
                for array in sent[rank]:
                    ranks.nccl.send(handle, _at(array), array.size, BYTE, head, stream)
            for source, array in arriving if rank == 0 else ():
                ranks.nccl.receive(handle, _at(array), array.size, BYTE, source, stream)

        into: list[list[Any]] = [[] for _ in teams.speakers]
        into[0] = [array for _, array in arriving]
        for _ in heads[1:]:
            tell(teams.speakers, sent, "values")
        ranks.give("all_gather", sent, into, give)


def _arriving(
    ranks: NcclRanks, every: Sequence[Sequence[Row]], mine: int
) -> Iterator[tuple[int, Any]]:
    """Give what comes from others, each array with the rank that sends it, in their order."""
    replica = 0
    for peer, rows in enumerate(every):
        for row in rows:
            if peer != mine:
                for array in _bytes(row):
                    yield ranks.of[replica], array
            replica += 1


def _put(place: Row, row: Row) -> None:
    """Copy a row to its place, where it is not there already."""
    away = [t for t, array in enumerate(row) if _at(array) != _at(place[t])]
    if away:
        copy_row(place.part(away), row.part(away))


def tell(devices: Sequence[Device], rows: Iterable[Sequence[Any]], what: str) -> None:
    """Tell of what each rank gives NCCL."""
    if observe.counting:
        for device, row in zip(devices, rows, strict=True):
            observe.moved(device.short, "NCCL", sum(array.nbytes for array in row), what)


def _bytes(row: Row) -> Row:
    """Return the bytes of those arrays that have any."""
    arrays, homes = [], []
    for array, device in zip(row, row.devices, strict=True):
        if array.size:
            if not array.flags.c_contiguous:
                raise ShapeError(
                    f"an array of shape {list(array.shape)} is not contiguous; copy it first"
                )
            arrays.append(array.reshape(-1).view(np.uint8))
            homes.append(device)
    return Row(arrays, homes)


def _at(array: Any) -> int:
    place: int = array.data.ptr
    return place
