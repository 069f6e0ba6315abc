"""What the doctor asks CUDA, of CuPy or of the stand-in."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from minidist.comm import nccl_library
from minidist.comm.nccl_library import Library, OfCupy
from minidist.doctor import gpus

EVERYTHING = {"cupy", "toolkit", "nvrtc", "cublas", "nccl", "cudnn", "supports", "devices"}


def told_with(monkeypatch: pytest.MonkeyPatch, kind: type[Library], version: int) -> Any:
    """Return what is told where NCCL is of a version, and comes through a kind of binding."""
    monkeypatch.setattr(kind, "__init__", lambda self: setattr(self, "version", version))
    monkeypatch.setattr(nccl_library, "load", kind)
    sys.modules.pop("minidist.doctor.cuda", None)
    return import_module("minidist.doctor.cuda").ask()


def test_a_library_that_is_not_there_says_why(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules.pop("minidist.doctor.cuda", None)
    asking = import_module("minidist.doctor.cuda")
    monkeypatch.setattr(asking, "load", lambda: 1 / 0)
    assert asking._or_why(asking._nccl) == "none (division by zero)"
    monkeypatch.delattr(standin.cuda, "cublas")
    assert asking._or_why(asking._cublas).startswith("none (")
    assert asking._or_why(asking._cudnn).startswith("none (cuDNN's frontend cannot be imported")


def test_it_tells_versions_and_which_gpu_reaches_which(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.__version__ = "14.2.0"
    runtime = standin.cuda.runtime
    runtime.runtimeGetVersion, runtime.driverGetVersion = lambda: 12090, lambda: 13010
    runtime.deviceCanAccessPeer = lambda gpu, peer: gpu == 1
    runtime.getDeviceProperties = lambda gpu: {
        "name": b"A GPU",
        "totalGlobalMem": 1 << 30,
        "major": 9,
        "minor": gpu,
    }
    standin.cuda.nvrtc = SimpleNamespace(getVersion=lambda: (12, 9))
    destroyed: list[int] = []
    standin.cuda.cublas = SimpleNamespace(
        create=lambda: 7, getVersion={7: 120901}.__getitem__, destroy=destroyed.append
    )
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=lambda: 91002))
    told = told_with(monkeypatch, OfCupy, 22304)
    assert told.pop("nccl") == "2.23.4 through CuPy"
    assert destroyed == [7]
    about = {"name": "A GPU", "memory": 1 << 30}
    assert told == {
        "cupy": "14.2.0",
        "toolkit": "12.9",
        "nvrtc": "12.9",
        "cublas": "12.9.1",
        "cudnn": "9.10.2",
        "supports": "13.1",
        "devices": [
            {**about, "capability": "9.0", "reaches": []},
            {**about, "capability": "9.1", "reaches": [0]},
        ],
    }


def test_without_a_driver_cupy_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the doctor hands on its last words."""
    pytest.importorskip("cupy")
    monkeypatch.setattr(gpus, "_driver", lambda: "580.1")
    found = gpus.find()
    if found.facts["gpus"]["devices"]:
        assert set(found.facts["gpus"]) >= EVERYTHING
        json.dumps(found.facts)
    else:
        (problem,) = found.problems
        assert "CUDA cannot be used: " in problem.what and "minidist[cuda13]" in problem.cure
