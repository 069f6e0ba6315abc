"""CudaMachine: what launches the kernels of `minidist.kernels` on a GPU, through CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from minidist.device.base import Array
from minidist.kernels import source
from minidist.kernels.source import Module

if TYPE_CHECKING:
    from minidist.device.cuda import CudaDevice
    from minidist.device.cuda_dnn import Convolutions

SLOTS = 4  # small arrays of one shape that a stream keeps, those of its latest calls
SHAPES = 256  # of how many shapes, each stream


class CudaMachine:
    """A `minidist.kernels.grid.Machine`: everything goes to the stream that CuPy is told."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    @property
    def blas(self) -> Any:
        """The handle of cuBLAS for what is given now."""
        return self._device.stream_here().blas

    @property
    def dnn(self) -> Convolutions | None:
        """What does convolutions by cuDNN, given now, if anything does."""
        return self._device.stream_here().dnn

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: tuple[int, int],
        block: int,
        arguments: Sequence[Any],
    ) -> None:
        source.kernel(module, kernel)(grid, (block,), tuple(arguments))

    def address(self, array: Array) -> int:
        place: int = array.data.ptr
        return place

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return cupy.ndarray(shape, dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Array:
        array = cupy.ndarray(shape, dtype)
        array.fill(value)
        return array

    def constant(self, array: np.ndarray[Any, Any]) -> Array:
        # Each stream has its own: what it writes comes after all that it has read before, so a
        # table of addresses, which may be another one in each step, needs no new memory. And only
        # one thread at a time gives a stream work.
        constants, key = self._device.stream_here().constants, (array.dtype, array.shape)
        slots = constants.pop(key, None)
        if slots is None:
            slots = Slots(self.empty((SLOTS, *array.shape), array.dtype))
            while len(constants) >= SHAPES:
                del constants[next(iter(constants))]
        constants[key] = slots  # the latest is the last
        place, is_there = slots.find(array.tobytes())
        if not is_there:
            self._device.copy(place, array)
        return place


class Slots:
    """Places for arrays of one shape, and what is in them."""

    def __init__(self, memory: Array) -> None:
        self._places = {bytes([i]): memory[i] for i in range(len(memory))}  # the latest is the last

    def find(self, content: bytes) -> tuple[Array, bool]:
        """Return the place of this content, and whether it is there; else it is the oldest."""
        there = content in self._places
        place = self._places.pop(content if there else next(iter(self._places)))
        self._places[content] = place
        return place, there
