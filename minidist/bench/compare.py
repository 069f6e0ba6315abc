"""`--variable_update=all`: every policy in turn on the same data and start, and one table of them.

Each run warms up by itself, so that none pays for the process's start alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from minidist import data
from minidist.bench import report
from minidist.bench.counts import bytes_cell, staleness_cell
from minidist.bench.crew import Crew
from minidist.bench.flags import Flags
from minidist.bench.flags.contradictions import DURING_TRAINING, IN_STEP
from minidist.bench.run import run
from minidist.cluster import Cluster
from minidist.errors import MinidistError
from minidist.variable_mgr import OPTIONS_OF

BASELINE = "independent"
POLICIES: dict[str, dict[str, Any]] = {
    "independent": {"variable_update": "independent"},
    "parameter_server": {"variable_update": "parameter_server"},
    "parameter_server+staged_vars": {"variable_update": "parameter_server", "staged_vars": True},
    "replicated": {"variable_update": "replicated"},
    "replicated+relaxed": {"variable_update": "replicated", "variable_consistency": "relaxed"},
}
SUMMED: dict[str, dict[str, Any]] = {  # those of several workers
    "distributed_all_reduce": {"variable_update": "distributed_all_reduce"},
    "collective_all_reduce": {"variable_update": "collective_all_reduce"},
    "collective_all_reduce+relaxed": {
        "variable_update": "collective_all_reduce",
        "variable_consistency": "relaxed",
    },
}
SERVED: dict[str, dict[str, Any]] = {  # and of parameter servers
    "parameter_server": {"variable_update": "parameter_server"},
    "parameter_server+staged_vars": {"variable_update": "parameter_server", "staged_vars": True},
    "parameter_server+async": {"variable_update": "parameter_server", "cross_replica_sync": False},
    "distributed_replicated": {"variable_update": "distributed_replicated"},
}
# What tells policies of the tables apart.
OWN = ("staged_vars", "variable_consistency", "cross_replica_sync")


def policies(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return the policies that there are for some processes, by what the table calls them."""
    if cluster.size == 1:
        return POLICIES
    served = SERVED if cluster.servers else {}
    return {BASELINE: POLICIES[BASELINE], **served, **SUMMED}


def compare(flags: Flags, dataset: data.Dataset, crew: Crew) -> dict[str, Any]:
    """Run all policies, print a table of those that have ended, and return what the JSON holds.

    The table is printed also where one fails, whose name its error says, and on Ctrl-C.
    """
    runs: dict[str, dict[str, Any]] = {}
    table = policies(crew.cluster)
    try:
        for name, chosen in table.items():
            print(f"\n{name} ({len(runs) + 1} of {len(table)})\n")
            runs[name] = _run(name, chosen, flags, dataset, crew)
    finally:
        if runs:
            print_table(runs, dataset.unit)
    return report.comparison(flags, runs)


def _run(
    name: str, chosen: Mapping[str, Any], flags: Flags, dataset: data.Dataset, crew: Crew
) -> dict[str, Any]:
    try:
        return run(flags_of(name, flags, chosen), dataset, crew)
    except MinidistError as error:
        error.args = (f"{name}: {error}",)
        raise


def flags_of(name: str, flags: Flags, chosen: Mapping[str, Any]) -> Flags:
    """Return the flags with which a policy of a table runs: without those that do not fit it.

    Under --train_dir each has a folder of its own, and a trace file with its name.
    """
    in_step = chosen.get("cross_replica_sync", True)
    unfit = [*OWN]
    unfit += [
        option for option, owners in OPTIONS_OF.items() if chosen["variable_update"] not in owners
    ]
    if in_step:
        unfit += ["staleness_bound"]
    if chosen.get("staged_vars"):
        unfit += ["caching"]
        unfit += [*DURING_TRAINING, "stop_at_top_1_accuracy"]
    if not in_step:
        unfit += [*IN_STEP, "stop_at_top_1_accuracy"]
    defaults: dict[str, Any] = {item.name: item.default for item in fields(Flags)}
    changes = {option: defaults[option] for option in unfit} | dict(chosen)
    if flags.train_dir is not None:
        changes["train_dir"] = str(Path(flags.train_dir, name))
    if flags.trace_file is not None:
        file = Path(flags.trace_file)
        changes["trace_file"] = str(file.with_name(f"{file.stem}.{name}{file.suffix}"))
    return replace(flags, **changes)


def print_table(runs: Mapping[str, Mapping[str, Any]], unit: str) -> None:
    """Print two tables with a row for each run: what came out of it, and what that has cost.

    `unit` is what the data set counts.
    """
    from rich.console import Console
    from rich.table import Table

    results_table = Table(caption=f"ratio: of {unit}/sec to those of {BASELINE}")
    costs_table = Table(
        caption="bytes, ms of waiting: per step; staleness: in updates; hidden: of communication"
    )
    for table, columns in ((results_table, (f"{unit}/sec", *RESULTS)), (costs_table, COSTS)):
        table.add_column("policy", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
    for name, results in runs.items():
        results_table.add_row(name, *_cells(results, runs[BASELINE]))
        costs_table.add_row(name, *[cell(results) for cell in COSTS.values()])
    for table in (results_table, costs_table):
        print()
        Console().print(table)


def _waiting(results: Mapping[str, Any]) -> str:
    return f"{results['phases']['waiting']:.2f}" if results["phases"] else "-"


def _hidden(results: Mapping[str, Any]) -> str:
    share = results["hidden_share"]
    return "-" if share is None else f"{100 * share:.0f} %"


RESULTS = ("ratio", "final loss", "accuracy")
COSTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "bytes": bytes_cell,
    "staleness": staleness_cell,
    "waiting": _waiting,
    "hidden": _hidden,
}


def _cells(results: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[str, str, str, str]:
    accuracy = f"{results['accuracy']['top_1']:.4f}" if results["accuracy"] else "-"
    if not results["steps"]:  # all of them were done before
        return "-", "-", "-", accuracy
    speed = results["images_per_sec"]["mean"]
    ratio = f"{speed / baseline['images_per_sec']['mean']:.3f}" if baseline["steps"] else "-"
    return f"{speed:.1f}", ratio, f"{results['steps'][-1]['loss']:.3f}", accuracy
