"""CUDA devices on a stand-in for CuPy, as a context manager for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import standin

from minidist.comm import auto
from minidist.device import known
from minidist.kernels import source


@contextmanager
def cuda(libraries: Path, seed: int) -> Iterator[Any]:
    """Let `import cupy` find a stand-in, and the names of CUDA devices new ones; gives it."""
    before = sys.modules.pop("cupy", None)
    auto.SPECS.setdefault("cuda", "copy")
    _forget()
    sys.modules["cupy"] = module = standin.cupy(libraries, seed)
    try:
        yield module
        for each in known():
            if each.kind == "cuda":
                each.close()
    finally:
        _forget()
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before


def _forget() -> None:
    names = import_module("minidist.device")._known
    for name in [name for name in sys.modules if name.startswith("minidist.device.cuda")]:
        del sys.modules[name]
    for name in [name for name in names if name.startswith("cuda")]:
        del names[name]
    source.kernel.cache_clear()
