"""Packages: which are installed, and what would bring those that are not."""

from __future__ import annotations

import platform
import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from minidist.device import cpu_onednn
from minidist.doctor.findings import Findings
from minidist.threads import cores

REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?P<wanted>[^;]*)(?:.*extra\s*==\s*[\"'](?P<extra>\w+))?"
)
# What each extra is for. Those of a computer's other owners, as tests, are not the doctor's matter.
EXTRAS = {"mpi": "several processes", "images": "image files", "plot": "plots"}
COMPILED = ("channel", "convolution", "heap", "layer", "reduce", "rendezvous", "team", "update")


def find() -> Findings:
    """Return versions: of minidist and its compiled parts, Python, and every package it needs."""
    found = Findings()
    found.facts["minidist"] = _minidist(found)
    found.facts["python"] = {
        "version": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
    }
    found.facts["packages"] = _packages(found)
    found.facts["blas"] = _blas()
    return found


def version(name: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _minidist(found: Findings) -> dict[str, Any]:
    import minidist.kernels

    missing = []
    for name in COMPILED:
        try:
            import_module(f"minidist.kernels.{name}")
        except ImportError as cause:
            missing.append(f"{name} ({cause})")
    if missing:
        found.wrong(f"compiled parts are missing: {', '.join(missing)}", "pip install -e .")
    here = Path(minidist.kernels.__path__[0])
    return {"version": version("minidist"), "compiled": not missing, "kernels": str(here)}


def _packages(found: Findings) -> list[dict[str, Any]]:
    try:
        wanted = metadata.requires("minidist") or []
    except metadata.PackageNotFoundError:
        found.wrong("minidist is used without being installed", "pip install -e . in its folder")
        return []
    packages = []
    for line in wanted:
        match = REQUIREMENT.match(line)
        extra = match["extra"] if match else None
        if match is None or (extra is not None and extra not in EXTRAS):
            continue
        if "platform_machine" in line and not cpu_onednn.has_package():
            continue
        name = match["name"]
        has = version(name)
        package = {"name": name, "wanted": match["wanted"].strip(), "version": has, "extra": extra}
        packages.append(package)
        if has is None and extra is None:
            found.wrong(f"{name} is missing", f"pip install '{name}{package['wanted']}'")
    return packages


def _blas() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    kinds = [f"{pool['internal_api']} {pool['version']}" for pool in pools]
    return {
        "libraries": kinds,
        "threads": max((pool["num_threads"] for pool in pools), default=0),
        "cores": cores(),
    }
