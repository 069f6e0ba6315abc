"""Every name, argument and number of NCCL that minidist uses is that of the installed bindings.

Both bindings load without a driver, and so does NCCL itself, which then says what it misses.
"""

from __future__ import annotations

import ast
import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nccl_standin
import pytest
from devices import gpus

from minidist.comm import nccl_library
from minidist.comm.nccl_library import Nccl4py, OfCupy, load
from minidist.comm.nccl_ranks import NcclRanks
from minidist.comm.nccl_teams import Teams, one_each
from minidist.comm.peers import Peers
from minidist.errors import PeerError

bindings = pytest.importorskip("nccl.bindings.nccl")
cupy = pytest.importorskip("cupy.cuda.nccl")
runtime = pytest.importorskip("cupy").cuda.runtime

ARGUMENTS = {  # of ours, as the bindings call them
    "handle": {"comm"},
    "sent": {"sendbuff", "sendbuf"},
    "into": {"recvbuff", "recvbuf"},
    "count": {"count", "recvcount", "nranks", "ndev"},
    "kind": {"datatype"},
    "how": {"op"},
    "to": {"peer"},
    "source": {"peer"},
    "name": {"commId"},
    "unique": {"comm_id"},
    "result": {"result", "status"},
}


def calls(binding: type) -> list[tuple[str, list[str]]]:
    """Return what a binding's class calls, with the names of the arguments that it gives."""
    tree = ast.parse(Path(nccl_library.__file__).read_text())
    (body,) = [node for node in tree.body if getattr(node, "name", "") == binding.__name__]
    found = []
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            if of in ("self._nccl", "handle", "self._nccl.UniqueId"):
                found.append((node.func.attr, [ast.unparse(each) for each in node.args]))
    return found


def parameters(function: Any) -> list[str]:
    """Return the names of a compiled function's parameters, as its documentation has them."""
    line = function.__doc__.strip().splitlines()[0]
    names = [
        part.split("=")[0].split()[-1]
        for part in line[line.index("(") + 1 : line.rindex(")")].split(",")
        if part
    ]
    return [name for name in names if name != "self"]


@pytest.mark.parametrize(("name", "given"), calls(Nccl4py), ids=lambda each: str(each))
def test_nccl4py_takes_what_it_is_given(name: str, given: list[str]) -> None:
    fits(getattr(bindings, name, None) or getattr(bindings.UniqueId, name), given)


@pytest.mark.parametrize(("name", "given"), calls(OfCupy), ids=lambda each: str(each))
def test_cupy_takes_what_it_is_given(name: str, given: list[str]) -> None:
    if name == "NcclError":
        return
    fits(getattr(cupy, name, None) or getattr(cupy.NcclCommunicator, name), given)


def fits(function: Any, given: list[str]) -> None:
    if (
        not (function.__doc__ or "").strip().splitlines()[0:1]
        or "(" not in function.__doc__.splitlines()[0]
    ):
        assert not given
        return
    wanted = parameters(function)
    for ours, theirs in zip(given, wanted, strict=False):
        assert theirs in ARGUMENTS.get(ours, {ours}) or "(" in ours, (given, wanted)
    assert len(wanted) - function.__doc__.splitlines()[0].count("=") <= len(given) <= len(wanted)


def test_numbers() -> None:
    for name, number in nccl_library.TYPES.items():
        assert bindings.DataType[name.capitalize()] == number
        if name != "bfloat16" or hasattr(cupy, "NCCL_BFLOAT16"):
            assert getattr(cupy, f"NCCL_{name.upper()}") == number
    assert bindings.RedOp.Sum == cupy.NCCL_SUM == nccl_library.SUM
    assert bindings.RedOp.Avg == cupy.NCCL_AVG == nccl_library.AVERAGE
    assert bindings.Result.Success == nccl_library.READY
    assert bindings.Result.InProgress == nccl_library.IN_PROGRESS
    bindings.check_status(nccl_library.IN_PROGRESS)  # is no error
    assert sorted(nccl_library.TYPES, key=nccl_library.TYPES.get) == nccl_standin.KINDS


def test_the_stand_in_has_the_same_functions() -> None:
    world: Any = SimpleNamespace(version=0, start_group=None, new_id=None, finish=None)
    for name, function in vars(nccl_standin.nccl4py(world)).items():
        if name.startswith("__") or function is None:
            continue
        real = getattr(bindings, name)
        if name not in (
            "Config",
            "UniqueId",
            "get_unique_id",
            "group_end",
            "comm_get_async_error",
            "get_version",
        ):
            ours = inspect.signature(function).parameters
            assert len(ours) == len(parameters(real)), name


@pytest.mark.parametrize("binding", [Nccl4py, OfCupy])
def test_what_nccl_says_without_a_communicator(binding: Any) -> None:
    library = binding()
    assert library.version >= 21800 and len(library.new_id()) == 128
    assert library.new_id() != library.new_id()
    with library.group():
        pass
    assert "remote process exited" in library.said(6)


def test_the_better_binding_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    library = load()
    assert isinstance(library, Nccl4py) and not library.blocking
    for driver, orders_by_launch in ((12030, True), (12020, False)):
        monkeypatch.setattr(runtime, "driverGetVersion", lambda known=driver: known)
        assert library.several == (library.version >= 23000 and orders_by_launch)


def test_config_has_what_is_set() -> None:
    config = bindings.Config()
    config.blocking, config.max_ctas = 0, 8
    assert (config.blocking, config.max_ctas) == (0, 8)


class Gpu:
    """As much of a device as it takes to join."""

    kind, index, short, uuid, gpu = "cuda", 0, "cuda:0", "", nullcontext()


@pytest.mark.skipif(gpus() > 0, reason="is about a machine without a GPU")
@pytest.mark.parametrize("binding", [Nccl4py, OfCupy])
def test_without_a_driver_nccl_says_so_and_nothing_hangs(binding: Any) -> None:
    device: Any = Gpu()
    with pytest.raises(PeerError, match=r"NCCL cannot join the 1 ranks .*: .*unhandled cuda error"):
        NcclRanks(binding(), Teams([device], one_each([device])), Peers(lambda: (5.0, 20.0)), [0])
