"""What a run says: a line for each measurement, in the manner of nccl-tests, and the JSON file.

Lines that begin with # are not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import minidist
from minidist.bench.report import versions
from minidist.comm_bench.flags import Flags
from minidist.comm_bench.measure import Measured

SCHEMA = 1
_COLUMNS = "{:>11} {:>11} {:>8} {:>8} {:<14} {:<16} {:<3} {:>10} {:>22} {:>7} {:>7} {:>6}"


def header(
    flags: Flags, processes: Sequence[Mapping[str, Any]], elsewhere: Mapping[str, str], mpi: str
) -> list[str]:
    """Return the lines before the measurements; elsewhere: why there is no such communicator."""
    replicas = sum(len(process["devices"]) for process in processes)
    where = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    calls = f"{flags.warmup_iters} calls to warm up, {flags.iters} timed, {flags.check} checked"
    return [
        f"# minidist {minidist.__version__}{', ' + mpi if mpi else ''}",
        f"# {replicas} replicas in {where}; of each line {calls}",
        *(f"#   {one['name']} on {one['host']}: {', '.join(one['devices'])}" for one in processes),
        *(f"# not here: {name}: {why}" for name, why in elsewhere.items()),
        "# in place: what a replica gives and gets is the same memory. time: the median, the",
        "# fastest and the slowest call. algbw: bytes by time. busbw: what a link has carried.",
        "#",
        _COLUMNS.format(
            *("#      size", "count", "type", "redop", "verb", "algorithm", "in"),
            *("time", "lowest .. highest", "algbw", "busbw", "#wrong"),
        ),
        _COLUMNS.format(
            *("#       (B)", "(elements)", "", "", "", "", ""),
            *("(us)", "(us)", "(GB/s)", "(GB/s)", ""),
        ),
    ]


def line(measured: Measured) -> str:
    """Return the line of one measurement."""
    times = measured.microseconds
    return _COLUMNS.format(
        measured.nbytes,
        measured.count,
        measured.dtype,
        measured.op,
        measured.verb,
        measured.way,
        "yes" if measured.in_place else "no",
        _short(times["median"]),
        f"{_short(times['lowest'])} .. {_short(times['highest'])}",
        f"{measured.algbw:.2f}",
        f"{measured.busbw:.2f}",
        "N/A" if measured.wrong is None else measured.wrong,
    )


def closing(results: Sequence[Measured]) -> list[str]:
    """Return the last lines, with the words of nccl-tests, which scripts look for."""
    wrong = wrong_in(results)
    average = sum(measured.busbw for measured in results) / len(results)
    verdict = "N/A" if wrong is None else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    return [f"# Out of bounds values : {verdict}", f"# Avg bus bandwidth    : {average:g}", "#"]


def wrong_in(results: Sequence[Measured]) -> int | None:
    """Return how many elements were wrong in all measurements; None where nothing was checked."""
    counts = [measured.wrong for measured in results if measured.wrong is not None]
    return sum(counts) if counts else None


def document(
    flags: Flags,
    processes: Sequence[Mapping[str, Any]],
    elsewhere: Mapping[str, str],
    mpi: str,
    results: Sequence[Measured],
) -> dict[str, Any]:
    """Return the results in schema 1; docs/comm_bench.md has its fields."""
    return {
        "schema": SCHEMA,
        "config": flags.config(),
        "processes": list(processes),
        "elsewhere": dict(elsewhere),
        "results": [_record(measured) for measured in results],
        "wrong": wrong_in(results),
        "versions": {**versions(), "mpi": mpi or None},
    }


def _record(measured: Measured) -> dict[str, Any]:
    return {
        "algorithm": measured.way,
        "verb": measured.verb,
        "datatype": measured.dtype,
        "op": measured.op,
        "in_place": measured.in_place,
        "bytes": measured.nbytes,
        "count": measured.count,
        "replicas": measured.replicas,
        "time_us": measured.microseconds,
        "times_us": [seconds * 1e6 for seconds in measured.seconds],
        "algbw": measured.algbw,
        "busbw": measured.busbw,
        "wrong": measured.wrong,
    }


def _short(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.0f}"
