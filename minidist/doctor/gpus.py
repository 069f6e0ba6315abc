"""GPUs: driver, CUDA, NVIDIA's libraries, and which GPU reaches which; what is missing of them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
from typing import Any

from minidist.doctor import packages
from minidist.doctor.findings import Findings

CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")  # by the CUDA that it is made for
PATIENCE = 60.0  # seconds until CUDA must have said something
DRIVER_OF_CUDA_13 = 580  # the first that knows it
NEEDED = {
    "nvrtc": "NVRTC, which compiles the kernels",
    "cublas": "cuBLAS, which multiplies matrices",
}
WITHOUT = {  # libraries that need not be there
    "nccl": "NCCL, so replicas on several GPUs sum through peer memory or the host",
    "cudnn": "cuDNN, so convolutions are columns and matrix products",
}


def find() -> Findings:
    """Return what there is of GPUs, and what is wrong with it."""
    found = Findings()
    driver = _driver()
    there = [name for name in CUPY if packages.version(name)]
    facts: dict[str, Any] = {"driver": driver, "packages": there, "devices": []}
    found.facts["gpus"] = facts
    if driver is None:
        return found
    facts["extra"] = extra = _extra(driver)
    if len(there) > 1:
        found.wrong(
            f"{' and '.join(there)} are both installed, and each has its files where the other has",
            f"pip uninstall -y {' '.join(there)}, then pip install 'minidist[{extra}]'",
        )
    elif there:
        _ask(found, facts)
    if os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0":
        found.wrong(
            "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM is set, and with per-thread default streams CuPy "
            "hands out memory that is still in use",
            "unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM",
        )
    return found


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, None where there is none."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        return next(iter(re.findall(r"\d+\.\d[\d.]*", file.readline())), "unknown")
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return "unknown"
    return None


def _extra(driver: str) -> str:
    """Return which of minidist's extras is for a driver."""
    number = driver.partition(".")[0]
    old = number.isdigit() and int(number) < DRIVER_OF_CUDA_13
    return "cuda12" if old else "cuda13"


def _ask(found: Findings, facts: dict[str, Any]) -> None:
    """Let another process ask CUDA."""
    command = [sys.executable, "-m", "minidist.doctor.cuda"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found.wrong(
            f"CUDA has said nothing for {PATIENCE:g} s", "see whether nvidia-smi answers; reboot"
        )
        return
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        found.wrong(
            f"there is a driver, {facts['driver']}, but CUDA cannot be used: {why}",
            f"pip install 'minidist[{facts['extra']}]', or a driver that fits "
            + ", ".join(facts["packages"]),
        )
        return
    facts |= json.loads(done.stdout)
    for library, words in NEEDED.items():
        if facts[library].startswith("none"):
            found.wrong(
                f"CuPy does not load {words}: {facts[library].removeprefix('none ')}",
                f"pip install 'minidist[{facts['extra']}]', which brings it with CuPy's [ctk]",
            )
