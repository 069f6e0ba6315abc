"""oneDNN: where its library is, whether it can be used here, and what it makes for a shape.

The library is a package of its own (onednn-cpu-gomp), and large, so it is loaded where the first
work for it comes. `minidist.kernels.onednn` is linked to it by name: once it is loaded from where
its package says, the loader looks no further.

Where it cannot be used, `find` returns None and `why_not` says why; everything works without it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from importlib import import_module, metadata
from typing import Any

PACKAGE = "onednn-cpu-gomp"
LIBRARY = "libdnnl.so.3"
HEADERS_PACKAGE, HEADER = "onednn-devel-cpu-gomp", "dnnl.hpp"

_found: tuple[Any, str] | None = None  # the module, or None and why not


def has_package() -> bool:
    """Whether there is such a package for this system."""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64")


def find() -> Any:
    """Return the module minidist.kernels.onednn, or None."""
    return _look()[0]


def why_not() -> str:
    """Return why there is none, as a sentence; empty where there is one."""
    return _look()[1]


def files(package: str, name: str) -> list[str]:
    """Return where an installed package has files of a name; raises ImportError without it."""
    try:
        found = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed; pip install {package}") from None
    return [os.path.realpath(str(file.locate())) for file in found if file.name == name]


def _look() -> tuple[Any, str]:
    global _found
    if _found is None:
        try:
            _found = _load(), ""
        except (ImportError, OSError) as cause:
            _found = None, str(cause)
    return _found


def _load() -> Any:
    if not has_package():
        raise ImportError("oneDNN comes as a package for Linux on x86-64 only")
    paths = files(PACKAGE, LIBRARY)
    if not paths:
        raise ImportError(f"{PACKAGE} has no {LIBRARY}; pip install --force-reinstall {PACKAGE}")
    try:
        ctypes.CDLL(paths[0])
    except OSError as cause:
        cure = f"pip install --force-reinstall {PACKAGE}"
        raise ImportError(f"oneDNN's library does not load ({cause}); {cure}") from None
    try:
        module = import_module("minidist.kernels.onednn")
    except ModuleNotFoundError:
        raise ImportError(
            f"minidist was built without {HEADERS_PACKAGE}, so it has no part that uses oneDNN; "
            "build it again"
        ) from None
    if not module.has_avx2():
        raise ImportError("this CPU has no AVX2 (or ONEDNN_MAX_CPU_ISA forbids it)")
    return module


def give_up() -> None:
    """Use it no more, in a child of a fork: OpenMP had threads that the child lacks."""
    global _found
    _found = None, "this process was forked from one in which oneDNN had several threads"
