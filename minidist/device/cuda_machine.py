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

CONSTANTS = 512  # small arrays that are kept on the GPU, those of the latest calls


class CudaMachine:
    """A `minidist.kernels.grid.Machine`: everything goes to the stream that CuPy is told."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._constants: dict[tuple[Any, ...], Array] = {}

    @property
    def blas(self) -> Any:
        """The handle of cuBLAS for what is given now."""
        return self._device.stream_here().blas

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
        key = array.dtype, array.shape, array.tobytes()
        found = self._constants.pop(key, None)
        if found is None:
            found = self.empty(array.shape, array.dtype)
            self._device.copy(found, array)
            while len(self._constants) >= CONSTANTS:
                self._constants.pop(next(iter(self._constants)), None)
        self._constants[key] = found  # the latest is the last
        found.data.mem.block.read(self._device.stream_here())
        return found
