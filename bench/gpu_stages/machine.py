"""What there is: the GPU, the driver, and the packages that the other stages need."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from importlib import metadata, util
from pathlib import Path

from gpu_stages.tell import STANDIN, tell, trying

NEEDED = {  # by the name that is imported, what pip calls it
    "numpy": "numpy",
    "cupy": "cupy-cuda13x or cupy-cuda12x",
    "Cython": "cython",
    "setuptools": "setuptools",
    "optree": "optree",
    "ml_dtypes": "ml_dtypes",
    "safetensors": "safetensors",
    "rich": "rich",
    "threadpoolctl": "threadpoolctl",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
OPTIONAL = {
    "pybind11": "pybind11",
    "nccl": "nccl4py",
    "cudnn": "nvidia-cudnn-frontend",
    "torch": "torch",
    "mpi4py": "mpi4py",
}
VERSIONS = (  # what is told of what is installed
    *("numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nccl4py"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "torch"),
)
QUERY = "name,driver_version,memory.total,memory.used,compute_mode"


def main() -> None:
    tell("Python", platform.python_version())
    missing = [pip for name, pip in NEEDED.items() if util.find_spec(name) is None]
    if shutil.which("g++") is None:
        missing.append("g++")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python.h")
    tell("missing", ", ".join(missing) or "nothing", good=not missing)
    absent = [pip for name, pip in OPTIONAL.items() if util.find_spec(name) is None]
    tell("missing, optional", ", ".join(absent) or "nothing")
    found = {name: _version(name) for name in VERSIONS}
    tell("versions", ", ".join(f"{name} {told}" for name, told in found.items() if told))
    if STANDIN:
        return
    with trying("GPUs"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        tell("GPUs", "; ".join(done.stdout.strip().splitlines()), good=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
