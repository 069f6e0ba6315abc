"""What others read of a GPU's Tensors and variables, by DLPack and __cuda_array_interface__."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import REAL, cuda

import minidist as md
from minidist.device import get

N = 1000
WAYS = "from_dlpack", "asarray"


def computed(value: float) -> md.Tensor:
    """Return a Tensor that the GPU has much to do for."""
    device = get("cuda:0")
    with md.context.entered(device=device):
        total = md.constant(np.full(N, value, np.float32))
        for _ in range(10):
            total = total * 2.0
        return total


def twice(module: Any, way: str, lent: Any) -> np.ndarray:
    """Let somebody with a stream of their own read what is lent; return twice that."""
    other = get("cuda:0.1")
    with other.giving():
        theirs = getattr(module, way)(lent)
        return other.copy_out(module.add(theirs, theirs))


@pytest.mark.parametrize("way", WAYS)
def test_who_reads_a_tensor_sees_all_of_it(cupy: Any, way: str) -> None:
    for i in range(4):
        assert (twice(cupy, way, computed(i)) == i * 2**11).all()
    assert twice(cupy, way, computed(1.0)[5:9]).shape == (4,)


@pytest.mark.parametrize("way", WAYS)
def test_who_reads_a_variable_sees_its_updates(cupy: Any, way: str) -> None:
    with md.Strategy(["cuda:0"]) as strategy:
        with strategy.scope():
            variable = md.Variable(np.zeros(N, np.float32))
        for i in range(4):
            variable.assign(computed(i))
            assert (twice(cupy, way, variable.copies[0]) == i * 2**11).all()


@pytest.mark.parametrize("way", WAYS)
def test_without_the_wait_the_stand_in_shows_wrong_numbers(libraries: Path, way: str) -> None:
    right = []
    for seed in range(6):
        with cuda(libraries, seed) as module:
            from minidist.device.cuda import CudaDevice

            tensor = computed(1.0)
            how: Callable[..., Any] = lambda self, array, how: how(array)  # noqa: E731
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CudaDevice, "lend", how)
                right.append((twice(module, way, tensor) == 2**11).all())
            module.gpu.drain()
    assert not all(right)


def test_what_cannot_be_lent_says_so(cupy: Any) -> None:
    with md.context.entered(device=get("cuda:0")):
        narrow = md.constant([1.0, 2.0], "bfloat16")
    with pytest.raises(BufferError, match=r"cannot be exported by DLPack.*ops.cast"):
        narrow.__dlpack__(stream=1)
    assert not hasattr(narrow, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="a Tensor on cpu:0 is in no GPU's memory"):
        _ = md.constant([1.0]).__cuda_array_interface__
    assert not hasattr(md.Variable(1.0), "__cuda_array_interface__")


@pytest.mark.gpu
def test_torch_reads_it(libraries: Path) -> None:
    torch = pytest.importorskip("torch")
    with cuda(libraries, REAL):
        for lend in (torch.from_dlpack, torch.as_tensor):
            assert lend(computed(1.0)).sum().item() == N * 2**10
