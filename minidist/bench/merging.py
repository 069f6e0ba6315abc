"""Merging: what was counted and timed in every worker, as one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minidist.instruments.profile import OfReplica as Profiled
from minidist.trace.phases import PHASES, OfReplica, Phases

Found = Mapping[str, Any]


def counts(of_workers: Sequence[Found]) -> dict[str, Any]:
    """Return the fields `bytes` and `staleness` of the JSON: sums over the workers, by link."""
    moved = [each["bytes"] for each in of_workers if each["bytes"] is not None]
    ages = [each["staleness"]["histogram"] for each in of_workers if each["staleness"] is not None]
    found: dict[str, Any] = {"bytes": None, "staleness": None}
    if moved:
        found["bytes"] = {
            kind: None if moved[0][kind] is None else _sum(each[kind] for each in moved)
            for kind in ("predicted", "measured", "input")
        }
    if ages:
        total = _sum(ages)
        found["staleness"] = {"histogram": {age: total[age] for age in sorted(total, key=int)}}
    return found


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, number in part.items():
            total[name] = total.get(name, 0) + number
    return dict(sorted(total.items()))


def phases(of_workers: Sequence[Found | None]) -> Phases | None:
    """Return the phases of all replicas, numbered through the workers.

    of_workers: what each has found, as Phases.json gives it. A share is the workers' mean. A worker
    knows how long its replicas waited for other workers, and not for which replica there: that is
    taken to be the slowest of them.
    """
    found = [each for each in of_workers if each is not None]
    if not found:
        return None
    replicas: list[OfReplica] = []
    for each in found:
        numbers = {of["replica"]: len(replicas) + k for k, of in enumerate(each["replicas"])}
        replicas += [_renumbered(of, numbers) for of in each["replicas"]]
    fastest = min(each.own for each in replicas)
    replicas = [replace(each, behind=each.own - fastest) for each in replicas]
    worker = [number for number, each in enumerate(found) for _ in each["replicas"]]
    for k, replica in enumerate(replicas):
        others = [each for each, of in zip(replicas, worker, strict=True) if of != worker[k]]
        rest = replica.phases["waiting"] - sum(replica.waited_for.values())
        if others and rest > 0:
            slowest = max(others, key=lambda each: each.own).replica
            replica.waited_for[slowest] = rest
    shares = [each["hidden_share"] for each in found if each["hidden_share"] is not None]
    return Phases(
        found[0]["steps"],
        sum(each["step"] for each in found) / len(found),
        {name: sum(each.phases[name] for each in replicas) / len(replicas) for name in PHASES},
        sum(shares) / len(shares) if shares else None,
        replicas,
    )


def profile(of_workers: Sequence[Sequence[Found] | None]) -> list[Profiled] | None:
    """Return the figures of all replicas, numbered through the workers; None unless asked for."""
    if of_workers[0] is None:
        return None
    every = [Profiled.from_json(each) for found in of_workers for each in found or ()]
    return [replace(each, replica=number) for number, each in enumerate(every)]


def _renumbered(of: Mapping[str, Any], numbers: Mapping[int, int]) -> OfReplica:
    waited = {numbers[int(who)]: ms for who, ms in of["waited_for"].items()}
    return OfReplica(
        numbers[of["replica"]], of["device"], of["phases"], of["own"], of["behind"], waited
    )
