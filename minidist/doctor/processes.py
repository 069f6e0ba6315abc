"""Processes: MPI, who has started this one, and, among several, who all of them are."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

from minidist import threads
from minidist.cluster import connect, launched
from minidist.cluster.line import SPEAKERS
from minidist.comm import implementation
from minidist.doctor import packages
from minidist.doctor.findings import Findings
from minidist.errors import ClusterError, MinidistError
from minidist.launch import mpiexec

DIALECTS = {**dict.fromkeys(SPEAKERS, "mpich"), "Open MPI": "openmpi"}  # by the MPI's name


def find(told: dict[str, Any]) -> Findings:
    """Return what is found. told: what `connect` is to be told, if there are several processes."""
    found = Findings()
    found.facts["mpi"] = _mpi(found)
    try:
        said = launched()
    except ClusterError as error:
        found.facts["launcher"] = {"winner": None, "why": str(error), "left_out": []}
        found.wrong(str(error), "unset the variables that are not of this job")
        return found
    found.facts["launcher"] = {
        "winner": None if said.winner is None else said.winner.launcher,
        "why": said.why,
        "left_out": [f"{what}: {why}" for what, why in said.left_out],
    }
    several = said.winner is not None and said.winner.size > 1
    if several or told:
        _meet(found, told)
    return found


def _mpi(found: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {"mpi4py": packages.version("mpi4py"), "library": None, "vendor": None}
    try:
        vendor, number = implementation.vendor()
        facts |= {"library": implementation.version(), "vendor": f"{vendor} {number}"}
    except ClusterError as error:
        vendor = ""
        facts["why_not"] = str(error)
    facts["mpiexec"] = []
    for path in mpiexec.candidates():
        try:
            there = mpiexec.find(path)
        except MinidistError as error:
            found.wrong(str(error), "leave it off the PATH, or name another with --mpiexec")
            continue
        facts["mpiexec"].append(
            {"path": there.path, "dialect": there.dialect, "version": there.version}
        )
    dialects = [each["dialect"] for each in facts["mpiexec"]]
    if vendor and not dialects:
        found.wrong(
            "there is an MPI, but no mpiexec beside this Python or on the PATH",
            "pip install mpich, or load your cluster's MPI module",
        )
    elif vendor in DIALECTS and dialects[0] != DIALECTS[vendor]:
        fitting = [each["path"] for each in facts["mpiexec"] if each["dialect"] == DIALECTS[vendor]]
        found.wrong(
            f"the mpiexec that comes first, {facts['mpiexec'][0]['path']}, is not of the MPI that "
            f"mpi4py uses, {vendor}: every process would be alone",
            f"use {fitting[0]}"
            if fitting
            else "install mpi4py for this MPI, or this MPI's mpiexec",
        )
    return facts


def _meet(found: Findings, told: dict[str, Any]) -> None:
    """Let all processes meet, and find who they are and whether they fit together."""
    try:
        cluster = connect(**told)
    except MinidistError as error:
        found.facts["ranks"] = []
        found.wrong(f"the processes do not come together: {error}", "see above")
        return
    me = {
        "name": cluster.me,
        "rank": cluster.rank,
        "host": os.uname().nodename,
        "process": os.getpid(),
        "threads": threads.cores(),
        "python": platform.python_version(),
        **{name: packages.version(name) for name in ("minidist", "numpy", "mpi4py")},
    }
    everybody = (*cluster.workers, *cluster.servers)
    brought = cluster.peers(ranks=everybody).meet("see the doctor", json.dumps(me).encode())
    ranks = sorted((json.loads(each) for each in brought), key=lambda each: int(each["rank"]))
    found.facts["ranks"] = ranks
    found.facts["me"] = cluster.me
    for name in ("python", "minidist", "numpy", "mpi4py"):
        versions = {each[name] for each in ranks}
        if len(versions) > 1:
            which = ", ".join(f"{each['name']} (on {each['host']}) {each[name]}" for each in ranks)
            found.wrong(f"the ranks have different versions of {name}: {which}", "install one")
