"""What there is: the GPU, the driver, and the packages that the other stages need."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from gpu_stages.tell import STANDIN, tell, trying

NEEDED = {  # by the name that is imported, what pip calls it
    "numpy": "numpy",
    "cupy": "cupy-cuda13x[ctk] or cupy-cuda12x[ctk]",
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
    if STANDIN or not cuda():
        return
    with trying("GPUs"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        tell("GPUs", "; ".join(done.stdout.strip().splitlines()), good=True)


def cuda() -> bool:
    """Tell whether CuPy finds a GPU, which all else needs, and the libraries that it loads."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if not count:
            raise RuntimeError("there is none")
    except Exception as failure:
        words = f"CuPy finds no GPU: {type(failure).__name__}: {failure}"
        tell("CUDA", words, good=False, ends=True)
        return False
    tell("CUDA", f"{count} GPUs", good=True)
    library("NVRTC", lambda: cupy.cuda.nvrtc.getVersion())
    library("cuBLAS", lambda: cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()))
    return True


def library(name: str, version: Callable[[], object]) -> None:
    """Tell the version of what CuPy loads when it is first asked for, or what would bring it."""
    try:
        tell(name, str(version()), good=True)
    except Exception as failure:
        package = next(filter(_version, ("cupy-cuda12x", "cupy-cuda13x")), "cupy-cuda12x")
        tell(name, f"none: pip install '{package}[ctk]' ({failure})", good=False)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
