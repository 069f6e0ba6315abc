"""Tensor: an array on a device that never changes.

A Tensor is a handle, nothing more: what computes on it is in `ops/`, what remembers where it came
from is a tape. Its array is C-contiguous, and nobody writes to it once it is in a Tensor; several
Tensors may share memory for that reason (a reshape is a view).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist import observe
from minidist.device.base import Array, Device


class Tensor:
    """An immutable array of any rank: `shape`, `dtype` and the `device` it lives on.

    `array` is the raw array of that device, for `device.ops`. Tensors compare by identity
    (`ops.equal` compares elements), so they can be keys of a dict.
    """

    __slots__ = ("__weakref__", "array", "device")

    # ndarray + Tensor is the Tensor's business, not an element-by-element loop of NumPy's.
    __array_priority__ = 1000

    def __init__(self, array: Array, device: Device) -> None:
        self.array = array
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        return self.array.ndim  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.array.size  # type: ignore[no-any-return]

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values in the host's memory, read-only; on a CPU device nothing is copied."""
        return self.device.ops.host_view(self.array)

    def item(self) -> Any:
        """Return the only element as a Python number. Raises ValueError if there are more."""
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.array.dtype.kind not in "iu":
            raise TypeError(f"a Tensor of dtype {self.dtype} cannot be an index; only integers can")
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a Tensor of shape () has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Export the memory itself. Whoever writes to it breaks the promise that Tensors keep.

        On a GPU the stream that is named waits for what has been given to compute it; let the
        Tensor live until that stream has read it. Raises BufferError for bfloat16.
        """
        if self.array.dtype.kind == "V":
            raise BufferError(self._foreign("DLPack"))
        return self.device.lend(self.array, lambda array: array.__dlpack__(**options))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()  # type: ignore[no-any-return]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """A GPU's memory itself, and the stream to wait for; see `__dlpack__`.

        Raises AttributeError elsewhere, and for bfloat16.
        """
        if self.device.kind != "cuda":
            raise AttributeError(f"a Tensor on {self.device.short} is in no GPU's memory")
        if self.array.dtype.kind == "V":
            raise AttributeError(self._foreign("__cuda_array_interface__"))
        return self.device.lend(self.array, lambda array: array.__cuda_array_interface__)

    def _foreign(self, way: str) -> str:
        return (
            f"a Tensor of {self.dtype} cannot be exported by {way}, where nobody knows that type; "
            'export ops.cast(x, "float32"), which holds the same values'
        )

    def __repr__(self) -> str:
        values = np.array2string(self.numpy(), separator=", ", threshold=20)
        return f"<Tensor {values} {self.shape} {self.dtype} on {self.device.short}>"

    if TYPE_CHECKING:  # what `install_operators` puts here

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, exponent: float) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __getitem__(self, index: Any) -> Tensor: ...


class Reading(Tensor):
    """What reading a variable gives: a Tensor, but for following the variable's updates."""

    __slots__ = ()


def to_device(tensor: Tensor, device: Device, what: str = "values") -> Tensor:
    """Return a copy of `tensor` on `device`, or `tensor` itself if it is there.

    what: what instruments call its bytes.
    """
    if tensor.device is device:
        return tensor
    array = device.allocate(tensor.shape, tensor.dtype)
    device.copy(array, tensor.array)
    if observe.counting:
        observe.moved(tensor.device.short, device.short, array.nbytes, what)
    return Tensor(array, device)
