"""Readable: what has a value to read can be used as that value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist import ops
from minidist.tensor import Tensor


class Readable:
    """What reads as a Tensor: operators and conversions are those of what `read()` returns."""

    __slots__ = ()

    __array_priority__ = 1000  # ndarray + variable is the variable's business, as for Tensor

    def read(self) -> Tensor:
        """Return the value; the class that is readable says how."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the value in the host's memory."""
        tensor = self.read()
        return tensor.device.copy_out(tensor.array)

    def item(self) -> Any:
        """Return the only element as a Python number. Raises ValueError if there are more."""
        return self.read().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.read().__array__(dtype, copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.read().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.read().__cuda_array_interface__

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __index__(self) -> int:
        return self.read().__index__()

    def __bool__(self) -> bool:
        return bool(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.read())


ops.install_operators(Readable)
