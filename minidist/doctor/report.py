"""The report: everything that was found, as lines for people, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from minidist.doctor.findings import Findings, Problem
from minidist.doctor.gpus import WITHOUT
from minidist.doctor.packages import EXTRAS


def merged(parts: Sequence[Findings]) -> Findings:
    """Return several findings as one."""
    whole = Findings()
    for part in parts:
        whole.facts |= part.facts
        whole.problems += part.problems
    return whole


def as_json(found: Findings) -> str:
    problems = [{"what": problem.what, "cure": problem.cure} for problem in found.problems]
    return json.dumps({**found.facts, "problems": problems}, indent=2)


def as_text(found: Findings) -> str:
    """Return the report: a line or a few for each thing, and at the end what is wrong."""
    lines: list[str] = []
    for title, texts in _sections(found.facts):
        for i, text in enumerate(texts):
            lines.append(f"{title if i == 0 else '':12}{text}")
    lines += ["", *_problems(found.problems)]
    return "\n".join(lines)


def _problems(problems: Sequence[Problem]) -> Iterator[str]:
    if not problems:
        yield "Nothing is missing."
    for problem in problems:
        yield f"PROBLEM     {problem.what}"
        yield f"  cure      {problem.cure}"


def _sections(facts: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    own, python = facts["minidist"], facts["python"]
    compiled = "compiled parts in" if own["compiled"] else "compiled parts are MISSING in"
    yield "minidist", [f"{own['version']}, {compiled} {own['kernels']}"]
    yield "Python", [f"{python['version']}, {python['executable']}", python["system"]]
    yield "packages", list(_packages(facts["packages"]))
    yield "machine", list(_machine(facts["machine"]))
    blas = facts["blas"]
    names = ", ".join(blas["libraries"]) or "unknown"
    yield (
        "threads",
        [
            f"{facts['machine']['threads']} for this process, shared among its replicas",
            f"BLAS: {names}, at most {blas['threads']} until a strategy is made",
        ],
    )
    yield "kernels", list(_kernels(facts["kernels"]))
    yield "devices", ["cpu, as many as wanted: cpu*4", *_gpus(facts["gpus"])]
    yield "MPI", list(_mpi(facts["mpi"]))
    launcher = facts["launcher"]
    yield "started by", [launcher["why"], *(f"left out: {why}" for why in launcher["left_out"])]
    if facts.get("ranks"):
        yield "ranks", [_rank(rank) for rank in facts["ranks"]]
    if facts["environment"]:
        yield "variables", [f"{name}={value}" for name, value in facts["environment"].items()]


def _packages(packages: Sequence[dict[str, Any]]) -> Iterator[str]:
    there = [f"{each['name']} {each['version']}" for each in packages if each["version"]]
    for start in range(0, len(there), 4):
        yield ", ".join(there[start : start + 4])
    for extra, purpose in EXTRAS.items():
        missing = [p["name"] for p in packages if p["extra"] == extra and not p["version"]]
        if missing:
            names = ", ".join(missing)
            yield f"without {names}: for {purpose}, pip install 'minidist[{extra}]'"


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    yield f"{machine['host']}: {machine['processor']}"
    quota = "" if machine["quota"] is None else f", a container's quota is {machine['quota']:g}"
    yield f"{machine['cores']} cores, of which {machine['allowed_cores']} may be used{quota}"
    parts = []
    if machine["memory"] is not None:
        parts.append(f"{machine['memory'] / 2**30:.1f} GB of memory")
    shared = machine["shared_memory"]
    if shared is not None:
        free, total = shared["free"] / 2**30, shared["total"] / 2**30
        parts.append(f"{free:.2f} of {total:.2f} GB shared memory free")
    yield "; ".join(parts)
    if shared is not None and shared["left_behind"]:
        count, size = len(shared["left_behind"]), shared["left_behind_bytes"] >> 20
        yield f"{count} files of {size} MB in it are of killed jobs; --json names them"


def _gpus(gpus: dict[str, Any]) -> Iterator[str]:
    if gpus["driver"] is None:
        yield "no cuda: there is no driver of NVIDIA's here"
        return
    cure = f"pip install 'minidist[{gpus['extra']}]'"
    if not gpus["packages"]:
        yield f"cuda: driver {gpus['driver']}, without CuPy: {cure}"
        return
    if not gpus["devices"]:
        yield f"no cuda: driver {gpus['driver']} and {' and '.join(gpus['packages'])} show no GPU"
        return
    yield (
        f"cuda: driver {gpus['driver']} for CUDA up to {gpus['supports']}, CuPy {gpus['cupy']} "
        f"with CUDA {gpus['toolkit']}, NVRTC {gpus['nvrtc']}, cuBLAS {gpus['cublas']}"
    )
    for number, gpu in enumerate(gpus["devices"]):
        peers = ", ".join(f"cuda:{peer}" for peer in gpu["reaches"])
        yield (
            f"cuda:{number}, {gpu['name']}, compute capability {gpu['capability']}, "
            f"{gpu['memory'] / 2**30:.0f} GB" + (f", reaches {peers}" if peers else "")
        )
    for library, words in WITHOUT.items():
        if gpus[library].startswith("none"):
            yield f"without {words}: {cure}"
        else:
            yield f"{words.partition(',')[0]} {gpus[library]}"


def _kernels(kernels: dict[str, Any]) -> Iterator[str]:
    if kernels["onednn"]:
        yield f"oneDNN {kernels['onednn']} and BLAS, chosen by {kernels['chosen_by']}"
    else:
        yield f"BLAS, without oneDNN: {kernels['why_not']}"
    if kernels["choices"]:
        yield f"{kernels['count']} choices in {kernels['choices']}"


def _mpi(mpi: dict[str, Any]) -> Iterator[str]:
    if mpi["library"] is None:
        yield mpi["why_not"]
    else:
        yield f"{mpi['vendor']} through mpi4py {mpi['mpi4py']}"
    for each in mpi["mpiexec"]:
        yield f"{each['path']}: {each['version']}"


def _rank(rank: dict[str, Any]) -> str:
    threads = f"{rank['threads']} thread{'s' if rank['threads'] > 1 else ''}"
    return f"{rank['rank']}: {rank['name']} on {rank['host']}, {threads}"
