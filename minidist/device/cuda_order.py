"""In order: a verb on a GPU reads and writes what other streams and devices have, in order.

Around each verb of `device.ops`
  1. its arrays that are elsewhere, and that it does not reach from here, are copied; of those that
     it changes it gets buffers, which are copied back afterwards,
  2. the stream of the calling thread's role follows who wrote what it reads, and who reads or
     writes what it writes,
  3. CuPy is told the GPU, the stream and the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import cupy
import numpy as np

from minidist import observe
from minidist.device.base import Array
from minidist.device.ops import WRITES, Ops

if TYPE_CHECKING:
    from minidist.device.cuda import CudaDevice

Verb = TypeVar("Verb", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=Ops)
WAITS = {"host_view", "sum_squares", "first_nonfinite"}  # give numbers to the host
TOUCHES_NOTHING = {"share_memory", "reshape"}
REACHES = {"sum", "convert"}  # by our own kernels, which work on peers' memory too
ARRAYS = cupy.ndarray, np.ndarray


def in_order(kind: type[Kind]) -> type[Kind]:
    """Let every verb of a kind of Ops be in order, but those that wait or look at no elements."""
    for name in Ops.__abstractmethods__ - WAITS - TOUCHES_NOTHING:
        setattr(kind, name, ordered(getattr(kind, name)))
    return kind


def ordered(verb: Verb) -> Verb:
    """Let one verb, or what only reads its arrays, be in order."""
    writes = WRITES.get(verb.__name__, {})
    reaches = verb.__name__ in REACHES

    @wraps(verb)
    def in_its_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.device.giving() as stream:
            order = _Order(self.device, reaches)
            given = [order.look(value, writes.get(i)) for i, value in enumerate(args)]
            named = {name: order.look(value, writes.get(name)) for name, value in kwargs.items()}
            for block in {array.data.mem.block for array in order.reads}:
                block.read(stream)
            for block in {array.data.mem.block for array in order.writes}:
                block.write(stream)
            with observe.piece(stream, verb.__name__, order.reads, order.writes):
                result = verb(self, *given, **named)
            for home, array in order.back:
                if isinstance(home, np.ndarray):
                    self.device.fetch([home], [array])
                else:
                    self.device.copy(home, array)
        return result

    return in_its_place  # type: ignore[return-value]


class _Order:
    """What a verb reads and writes."""

    def __init__(self, device: CudaDevice, reaches: bool) -> None:
        self._device = device
        self._reaches = reaches
        self.reads: list[Array] = []
        self.writes: list[Array] = []
        self.back: list[tuple[Array, Array]] = []  # where a result belongs, and where it is

    def look(self, value: Any, written: bool | None) -> Any:
        """Return an argument of the verb as it is, or with arrays that are here.

        written: None if the verb only reads it, else whether it reads it too.
        """
        if isinstance(value, ARRAYS):
            return self._array(value, written)
        first = value
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if first is not value and isinstance(first, ARRAYS):
            return [self.look(item, written) for item in value]
        return value  # a number, a shape, an index, a window, or a list of these

    def _array(self, array: Array, written: bool | None) -> Array:
        device = self._device
        here = not isinstance(array, np.ndarray) and array.data.device_id == device.index
        if not here and not (self._reaches and device.reaches(array)):
            home, array = array, device.allocate(array.shape, array.dtype)
            if written is not False:
                device.copy(array, home)
            if written is not None:
                self.back.append((home, array))
        (self.reads if written is None else self.writes).append(array)
        return array
