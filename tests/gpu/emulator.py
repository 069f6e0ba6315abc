"""A machine of fibers on the CPU that runs the very .cu files that a GPU would run.

Its arrays are NumPy's. emulate.h says what a launch does; g++ compiles a module at its first one.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minidist.kernels.source import Module

HERE = Path(__file__).parent
TYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
FLAGS = ["-O0", "-ffp-contract=off", "-fno-strict-aliasing"]
QUIET = ["-Wno-unknown-pragmas", "-Wno-class-memaccess"]

ORDERS: dict[str, Callable[[int], np.ndarray]] = {
    "forwards": np.arange,
    "backwards": lambda n: np.arange(n)[::-1],
    "shuffled": lambda n: np.random.default_rng(n).permutation(n),
}

FAILURES = {
    1: "threads of a block wait for others that never come",
    2: "a word of 8 or 16 bytes is read or written at an address that is no multiple of them",
}


class Launch(ctypes.Structure):
    """emulate.h's struct of this name."""

    _fields_ = (
        ("grid", ctypes.c_int * 2),
        ("threads", ctypes.c_int),
        ("blocks", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
    )


class Emulator:
    """A `minidist.kernels.grid.Machine`; blocks and threads take turns in one of ORDERS."""

    def __init__(self, folder: Path, order: str = "forwards") -> None:
        self._folder = folder
        self._order = ORDERS[order]
        self.launches: list[str] = []

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: tuple[int, int],
        block: int,
        arguments: Sequence[Any],
    ) -> None:
        values = [np.asarray(argument) for argument in arguments]
        places = np.array([value.ctypes.data for value in values], np.uint64)
        blocks = self._order(grid[0] * grid[1]).astype(np.int32)
        turns = self._order(block).astype(np.int32)
        given = Launch(grid, block, *(array.ctypes.data for array in (blocks, turns, places)))
        entry = getattr(library(module, self._folder), f"launch_{kernel}")
        self.launches.append(kernel)
        outcome = entry(ctypes.byref(given))
        assert outcome == 0, f"{kernel}: {FAILURES[outcome]}"

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.full(shape, -123, dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
        return np.full(shape, value, dtype)

    def constant(self, array: np.ndarray) -> np.ndarray:
        return array


@cache
def library(module: Module, folder: Path) -> ctypes.CDLL:
    entries = "".join(f"GPU_ENTRY({name})\n" for name in module.kernels)
    text = f'#include "emulate.h"\n{module.text}\n{entries}'
    target = folder / f"{'-'.join(filter(None, module))}.so"
    options = [option for option in module.options if option.startswith(("-D", "-I", "--std"))]
    command = ["g++", "-shared", "-fPIC", *FLAGS, *options, f"-I{HERE}", "-Wall", "-Werror", *QUIET]
    done = subprocess.run(
        [*command, "-x", "c++", "-", "-o", str(target)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Every bit the same, but for those that tell one NaN from another."""
    assert got.dtype == want.dtype
    with np.errstate(invalid="ignore"):
        nan = np.isnan(want.astype(np.float64))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    bits = np.dtype(f"u{want.itemsize}")
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])
