"""CUDA devices for one test, as a context manager: on a stand-in for CuPy, or on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import dnn_standin
import pytest
import standin

from minidist.comm import auto
from minidist.device import known
from minidist.kernels import source

REAL = "GPU"  # in place of a stand-in's seed


@cache
def gpus() -> int:
    """Return how many GPUs CuPy finds; none where there is no CuPy, or no driver."""
    try:
        return int(import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:
        return 0


def need(module: Any, count: int) -> None:
    """Skip the test unless there are so many GPUs. module: what `cuda` gave."""
    if not hasattr(module, "gpu") and gpus() < count:
        pytest.skip(f"needs {count} GPUs")


@contextmanager
def cuda(libraries: Path, seed: int | str, *, dnn: bool = False) -> Iterator[Any]:
    """Let the names of CUDA devices find new ones; gives CuPy, or its stand-in in its place.

    dnn: whether beside the stand-in there is one for cuDNN.
    """
    if seed == REAL:
        with _new_devices():
            yield import_module("cupy")
        return
    auto.SPECS.setdefault("cuda", "copy")
    module = standin.cupy(libraries, int(seed))
    others = {"cupy": module, "cudnn": dnn_standin.cudnn(module) if dnn else None}
    with pytest.MonkeyPatch.context() as patch:
        for name, other in others.items():
            patch.setitem(sys.modules, name, other)
        with _new_devices():
            try:
                yield module
            finally:  # what is closed is waited for
                module.gpu.late.clear()
                module.gpu.fault = 0


@contextmanager
def _new_devices() -> Iterator[None]:
    _forget()
    try:
        yield
        for each in known():
            if each.kind == "cuda":
                each.close()
    finally:
        _forget()


def _forget() -> None:
    names = import_module("minidist.device")._known
    for name in [name for name in sys.modules if name.startswith("minidist.device.cuda")]:
        del sys.modules[name]
    for name in [name for name in names if name.startswith("cuda")]:
        del names[name]
    source.kernel.cache_clear()
