"""Every name and argument of CuPy that minidist uses exists in the CuPy that is installed.

CuPy imports without a driver. Its cuBLAS needs NVIDIA's, so there the compiled module is read.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minidist
from minidist.dtypes import as_dtype
from minidist.kernels import source

cupy = pytest.importorskip("cupy")

FILES = [
    *sorted((Path(minidist.__file__).parent / "device").glob("cuda*.py")),
    Path(source.__file__),
    Path(minidist.__file__).parent / "doctor" / "cuda.py",
    Path(minidist.__file__).parent / "instruments" / "nvtx.py",
]
METHODS = {  # of CuPy's objects, where the sources only have a variable for them
    "cuda.Stream": ("wait_event", "ptr", "__enter__"),
    "cuda.Event": ("record", "ptr"),
    "cuda.Device": ("__enter__",),
    "cuda.MemoryPool": ("malloc", "free_all_blocks"),
    "cuda.MemoryPointer": ("ptr", "mem", "device_id"),
    "ndarray": (
        *("data", "shape", "dtype", "size", "nbytes", "itemsize", "flags", "view", "reshape"),
        *("transpose", "fill", "astype"),
    ),
}
SEVERAL = {"runtime": "cupy.cuda.runtime"}  # what the sources call by a shorter name


def chain(node: ast.AST) -> str | None:
    """Return a dotted name that begins with cupy."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    names.append(SEVERAL.get(node.id, node.id))
    name = ".".join(reversed(names))
    return name.removeprefix("cupy.") if name.startswith("cupy.") else None


def uses() -> Iterator[tuple[str, tuple[int, tuple[str, ...]] | None]]:
    """Give the names, and of calls how many arguments have none, and the names of the others."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and (name := chain(node.func)):
                words = tuple(word.arg for word in node.keywords if word.arg)
                yield name, (len(node.args), words)
            elif isinstance(node, ast.Attribute) and (name := chain(node)):
                yield name, None


NAMES = sorted({name for name, _ in uses()})
CALLS = sorted({(name, *call) for name, call in uses() if call is not None})


def found(name: str) -> Any:
    value = cupy
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_something_is_used() -> None:
    assert {"cuda.cublas.gemmEx", "cuda.runtime.memcpyPeerAsync", "ndarray"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if "cublas" not in name])
def test_a_name_exists(name: str) -> None:
    found(name)


@pytest.mark.parametrize(("kind", "names"), METHODS.items())
def test_methods_exist(kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        whole = found(kind)
        assert hasattr(whole, name) or f"~{kind.rpartition('.')[2]}.{name} " in whole.__doc__, name


@pytest.mark.parametrize(("name", "given", "words"), CALLS)
def test_arguments_exist(name: str, given: int, words: tuple[str, ...]) -> None:
    if "cublas" in name or name == "cuda.MemoryPool":
        return
    function = found(name)
    try:
        inspect.signature(function).bind(*range(given), **dict.fromkeys(words))
        return
    except ValueError:  # compiled
        pass
    except TypeError:
        assert isinstance(function, cupy.ufunc) or not inspect.isfunction(function)
    if isinstance(function, cupy.ufunc):
        assert set(words) <= {"out", "dtype"} and given + len(words) <= function.nargs
        return
    text = "\n".join(filter(None, (function.__doc__, getattr(function.__init__, "__doc__", ""))))
    for word in words:
        assert re.search(rf"\b{word}\b", text), f"{name} has no {word}"


def test_copies_take_what_they_are_given() -> None:
    runtime = cupy.cuda.runtime
    assert parameters(runtime.memcpyAsync.__doc__) == ["dst", "src", "size", "kind", "stream"]
    to_a_peer = ["dst", "dstDevice", "src", "srcDevice", "size", "stream"]
    assert parameters(runtime.memcpyPeerAsync.__doc__) == to_a_peer


def test_products_take_what_they_are_given() -> None:
    """What is called of cuBLAS, as the compiled module describes it."""
    (path,) = Path(cupy.__file__).parent.parent.glob("cupy_backends/cuda/libs/cublas.*.so")
    text = path.read_bytes().decode("latin-1")
    (line,) = set(re.findall(r"(?<![a-z])gemmEx\([^)]*\)", text))
    assert parameters(line) == [
        *("handle", "transa", "transb", "m", "n", "k", "alpha", "A", "Atype", "lda", "B", "Btype"),
        *("ldb", "beta", "C", "Ctype", "ldc", "computeType", "algo"),
    ]
    (line,) = set(re.findall(r"(?<![a-z])gemmStridedBatchedEx\([^)]*\)", text))
    assert parameters(line) == [
        *("handle", "transa", "transb", "m", "n", "k", "alpha", "A", "Atype", "lda", "strideA"),
        *("B", "Btype", "ldb", "strideB", "beta", "C", "Ctype", "ldc", "strideC", "batchCount"),
        *("computeType", "algo"),
    ]
    for name in {name.rpartition(".")[2] for name in NAMES if "cublas." in name}:
        assert f"cupy_backends.cuda.libs.cublas.{name}\0" in text, name


def parameters(line: str) -> list[str]:
    inside = line.partition("(")[2].partition(")")[0]
    return [part.split()[-1] for part in inside.split(",")]


class Owner:
    """Somebody who can be dropped."""


def test_views_of_an_array_know_its_block() -> None:
    """What blocks and ties rely on, with arrays of CuPy's that nothing is ever done with."""
    from minidist.device.cuda_memory import Block, Tied
    from minidist.device.cuda_ops import _bits

    dropped = []
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 1024, None, 0), 0)
    memory: Any = SimpleNamespace(device="a device", drop=lambda *what: dropped.append(what))
    stream: Any = SimpleNamespace(next=1, seen={})
    block = Block(pointer, stream, memory)
    array = cupy.ndarray((4, 8), np.float32, cupy.cuda.MemoryPointer(block, 0))
    part = array[1:3].reshape(-1).view(np.float16)[4:]
    assert (
        part.data.ptr == 4096 + 32 + 8 and part.data.mem.block is block and block.on == "a device"
    )
    owner = Owner()
    tied = cupy.ndarray(part.shape, part.dtype, cupy.cuda.MemoryPointer(Tied(part, owner), 0))
    rest, gone = tied[2:], weakref.ref(owner)
    assert rest.data.ptr == part.data.ptr + 4 and rest.data.mem.block is block
    narrow = cupy.ndarray((2, 3), as_dtype("bfloat16"), cupy.cuda.MemoryPointer(block, 64))
    assert _bits(narrow).dtype == np.uint16 and narrow.flags.c_contiguous and narrow.itemsize == 2
    del block, array, part, owner, tied, narrow
    gc.collect()
    assert gone() is not None and not dropped
    del rest
    gc.collect()
    assert gone() is None and dropped == [(pointer, stream, [])]
