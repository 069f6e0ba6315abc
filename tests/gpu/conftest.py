"""What the tests of emulated kernels share: the machine, and memory that notices what runs over."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import REAL, cuda, gpus
from emulator import ORDERS, Emulator

sys.path.append(str(Path(__file__).parent.parent))  # what these tests share with those of the CPU

MARGIN = 64  # bytes around every array, and the value of each of them
FILL = 0xA5


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled modules."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=ORDERS)
def each_order(request: pytest.FixtureRequest, libraries: Path) -> Emulator:
    return Emulator(libraries, request.param)


@pytest.fixture
def machine(libraries: Path) -> Emulator:
    return Emulator(libraries, "shuffled")


@pytest.fixture(params=range(2))
def standin(request: pytest.FixtureRequest, libraries: Path) -> Iterator[Any]:
    """A stand-in for CuPy, whose streams are done in an order that depends on the parameter."""
    with cuda(libraries, request.param) as module:
        yield module


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not gpus():
        pytest.skip("needs a GPU")


@pytest.fixture(params=[0, 1, pytest.param(REAL, marks=pytest.mark.gpu)])
def cupy(request: pytest.FixtureRequest, libraries: Path) -> Iterator[Any]:
    """As `standin`; and CuPy itself, where there is a GPU."""
    with cuda(libraries, request.param) as module:
        yield module


@pytest.fixture
def place() -> Iterator[Callable[..., np.ndarray]]:
    """Copy an array to where nothing else is, `shift` elements after a 64-byte boundary.

    After the test the bytes before and after it must be as they were.
    """
    around: list[np.ndarray] = []

    def placed(array: Any, shift: int = 0) -> np.ndarray:
        array = np.asarray(array)
        first = MARGIN + shift * array.itemsize
        memory = np.full(first + array.nbytes + 2 * MARGIN, FILL, np.uint8)
        memory = memory[-memory.ctypes.data % MARGIN :]
        inside = memory[first : first + array.nbytes]
        around.extend([memory[:first], memory[first + array.nbytes :]])
        copy = inside.view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    yield placed
    for margin in around:
        assert (margin == FILL).all(), "a kernel wrote outside of its arrays"
