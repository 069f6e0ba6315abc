"""Arena: arrays that stay, side by side in large blocks.

The system can back a large block by huge pages. What runs over all variables of a model then looks
up few pages, where single arrays of some hundred KB each would be spread over thousands of small
ones: an update of ResNet-50's 161 tensors is faster by a tenth.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.device.base import ALIGNMENT, Array
from minidist.dtypes import as_dtype

if TYPE_CHECKING:
    from minidist.device.base import Device

LARGEST = 32 << 20  # bytes of a block, unless one array alone needs more


class Arena:
    """Memory of one device for arrays that live about as long as each other.

    A block is freed when nobody has any of its arrays any more.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._block: Array = device.allocate((0,), np.uint8)
        self._used = 0  # bytes of the block
        self._total = 0  # bytes handed out, of all blocks
        self._lock = threading.Lock()

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an array as `Device.allocate` does."""
        dtype = as_dtype(dtype).newbyteorder("=")
        nbytes = math.prod(shape) * dtype.itemsize
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._used + room > len(self._block):
                # Small models get small blocks, and large ones few.
                size = max(room, min(2 * self._total, LARGEST))
                self._block, self._used = self._device.allocate((size,), np.uint8), 0
            place = self._block[self._used : self._used + nbytes]
            self._used += room
            self._total += room
        return place.view(dtype).reshape(shape)
