"""What CUDA says here, as one JSON object: `python -m minidist.doctor.cuda`.

It runs in a process of its own, so that a driver that hangs or crashes leaves the doctor alive.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import cupy

from minidist.comm.nccl_library import load
from minidist.device.cuda_dnn import cudnn


def ask() -> dict[str, Any]:
    """Return versions, and what each GPU is and which others it reaches.

    Raises whatever CuPy raises where there is none that can be used.
    """
    runtime = cupy.cuda.runtime
    told: dict[str, Any] = {
        "cupy": cupy.__version__,
        "toolkit": _dotted(runtime.runtimeGetVersion()),
        "nvrtc": _or_why(lambda: "{}.{}".format(*cupy.cuda.nvrtc.getVersion())),
        "cublas": _or_why(_cublas),
        "nccl": _or_why(_nccl),
        "cudnn": _or_why(_cudnn),
        "supports": _dotted(runtime.driverGetVersion()),
    }
    count = runtime.getDeviceCount()
    told["devices"] = [
        {
            **_about(runtime.getDeviceProperties(gpu)),
            "reaches": [
                peer
                for peer in range(count)
                if peer != gpu and runtime.deviceCanAccessPeer(gpu, peer)
            ],
        }
        for gpu in range(count)
    ]
    return told


def _about(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": properties["name"].decode(),
        "memory": properties["totalGlobalMem"],
        "capability": f"{properties['major']}.{properties['minor']}",
    }


def _nccl() -> str:
    return load().words


def _cublas() -> str:
    library = cupy.cuda.cublas
    handle = library.create()
    try:
        return _with_patch(library.getVersion(handle))
    finally:
        library.destroy(handle)


def _cudnn() -> str:
    return _with_patch(cudnn().backend_version())


def _with_patch(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"  # 91002 is 9.10.2


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"  # 12090 is 12.9


def _or_why(version: Callable[[], str]) -> str:
    """Return a version, or in its place why there is none."""
    try:
        return version()
    except Exception as failure:
        return f"none ({failure})"


if __name__ == "__main__":
    print(json.dumps(ask()))
