"""Teams: the replicas of a process, and the rank of NCCL that speaks for each of them.

    rows of replicas  ──brought──►  rows of ranks  ──NCCL──►  totals  ──hand_out──►  destinations

A rank speaks for one replica, on its device: then what it brings is the replica's own row, and a
total goes right into the destination there. Or for several, which sum by another communicator to
the first one's device, and fetch the total from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from minidist.comm.base import Communicator, copy_row
from minidist.comm.copy import Copy
from minidist.comm.row import Row
from minidist.comm.scratch import Scratch
from minidist.device import Array, Device
from minidist.traffic import Outline, Places, Traffic


class Team(NamedTuple):
    """Replicas, by their numbers in this process. inside: how several of them sum."""

    members: Sequence[int]
    inside: Communicator | None


def one_each(devices: Sequence[Device]) -> list[Team]:
    """Return a team for each replica."""
    return [Team((k,), None) for k in range(len(devices))]


def by_gpu(devices: Sequence[Device]) -> list[Team]:
    """Return a team for each GPU."""
    by_index: dict[int, list[int]] = {}
    for k, device in enumerate(devices):
        by_index.setdefault(device.index, []).append(k)
    return [
        Team(members, Copy([devices[k] for k in members]) if len(members) > 1 else None)
        for members in by_index.values()
    ]


class Teams:
    """All teams of a process. speakers: the device of each one's rank. of: each replica's team."""

    def __init__(self, devices: Sequence[Device], teams: Sequence[Team]) -> None:
        self._teams = tuple(teams)
        self.speakers = tuple(devices[team.members[0]] for team in teams)
        self.of = [0] * len(devices)
        for number, team in enumerate(teams):
            for k in team.members:
                self.of[k] = number
        self._near = {device: self.of[k] for k, device in enumerate(devices)}

    # --- sums

    def brought(
        self,
        sources: Sequence[Row],
        weights: Sequence[float] | None,
        scratch: Scratch,
        threads: int,
    ) -> list[Row]:
        """Return what each rank brings of rows of one dtype: Σ(w_i·x_i) over its team.

        Replicas of weight 0 have no say, not even with a NaN.
        """
        return [
            self._of_team(number, sources, weights, scratch, threads)
            for number in range(len(self._teams))
        ]

    def _of_team(
        self,
        number: int,
        sources: Sequence[Row],
        weights: Sequence[float] | None,
        scratch: Scratch,
        threads: int,
    ) -> Row:
        team, speaker = self._teams[number], self.speakers[number]
        heard = [k for k in team.members if weights is None or weights[k]]
        rows = [sources[k] for k in heard]
        factors = None if weights is None else [weights[k] for k in heard]
        plain = len(rows) == 1 and (factors is None or factors[0] == 1)
        if plain and all(usable(array, speaker) for array in rows[0]):
            return rows[0]
        total = scratch.row(speaker, sources[team.members[0]])
        if not rows:
            for array in total:
                speaker.ops.fill(array, 0)
        elif plain:
            copy_row(total, rows[0])
        elif team.inside is not None:
            team.inside._all_reduce(rows, [total], factors, 1.0, threads)
        else:
            speaker.ops.sum([total], rows, weights=factors, threads=threads)
        return total

    def totals(
        self, destinations: Sequence[Row], like: Sequence[Row], scratch: Scratch
    ) -> list[Row]:
        """Return where each rank puts its total: into a destination on its device, if there is one.

        like: what each rank brings.
        """
        return [
            placed_on(speaker, row, destinations, scratch)
            for speaker, row in zip(self.speakers, like, strict=True)
        ]

    def hand_out(self, totals: Sequence[Row], destinations: Sequence[Row]) -> None:
        """Copy totals to the destinations where they are not yet."""
        for row in destinations:
            near = [self._near.get(device, 0) for device in row.devices]
            found = [totals[rank][t] for t, rank in enumerate(near)]
            rest = [t for t, total in enumerate(found) if total is not row[t]]
            homes = [totals[rank].devices[t] for t, rank in enumerate(near)]
            if rest:
                copy_row(row.part(rest), Row(found, homes).part(rest))

    def predicted_bytes(
        self, tensors: Sequence[Outline], destinations: Sequence[Places]
    ) -> Traffic:
        """Return what moves when all replicas bring rows of such tensors, of one dtype.

        What NCCL sends to whom is its own business; it is given what each rank brings.
        """
        traffic, nbytes = Traffic(), sum(tensor.nbytes for tensor in tensors)
        for team, speaker in zip(self._teams, self.speakers, strict=True):
            if team.inside is not None:
                home = [[speaker] * len(tensors)]
                traffic.update(team.inside.predicted_bytes(tensors, home))
            traffic[f"{speaker.short}->NCCL"] += nbytes
        for places in destinations:
            for tensor, device in zip(tensors, places, strict=True):
                traffic.go(self.speakers[self._near.get(device, 0)], device, tensor.nbytes)
        return traffic

    # --- rows as they are

    def first_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return of each team the row of the replica on whose device its rank is."""
        return [rows[team.members[0]] for team in self._teams]

    def share(self, number: int, rows: Sequence[Row], source: Row) -> None:
        """Copy a row into those of all replicas of a team."""
        for k in self._teams[number].members:
            if rows[k] is not source:
                copy_row(rows[k], source)


def usable(array: Array, device: Device) -> bool:
    """Whether NCCL's rank on a device can read and write an array as it is."""
    if isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        return False
    return bool(array.data.device_id == device.index)


def placed_on(device: Device, like: Row, candidates: Sequence[Row], scratch: Scratch) -> Row:
    """Return arrays like a row's on a device: those of candidates there, others from scratch."""
    found = [next(_on(device, t, candidates), None) for t in range(len(like))]
    missing = [t for t, array in enumerate(found) if array is None]
    if missing:
        made = scratch.row(device, like.part(missing))
        for t, array in zip(missing, made, strict=True):
            found[t] = array
    return Row.on(device, found)


def _on(device: Device, t: int, rows: Sequence[Row]) -> Iterator[Array]:
    for row in rows:
        if row.devices[t] is device and usable(row[t], device):
            yield row[t]
