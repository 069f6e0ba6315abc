from collections.abc import Sequence
from typing import Any

import numpy as np

class Heap:
    """Memory for arrays, kept for the next ones when they are gone; see heap.h for its promises.

    Any number of threads may use one heap. It is there as long as anybody has it, or an array of
    its memory.
    """

    def use(self) -> None:
        """From now on let the arrays that this thread makes, in its present context, lie here."""

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an uninitialised C-contiguous array that lies here."""

    def trim(self) -> None:
        """Give back to the system what is free, as far as it fills huge pages.

        And until the next array is made, what is freed at the end.
        """

    @property
    def mapped(self) -> int:
        """Bytes of address space that the heap has from the system."""

    @property
    def in_use(self) -> int:
        """Bytes of them that arrays have."""

    @property
    def requests(self) -> int:
        """How often the heap has asked the system for memory."""

def poison(by: int) -> None:
    """Fill memory of all heaps with NaN when it is handed out and when it is freed.

    As long as the sum of what this was called with is above 0: 1 begins it, -1 ends it. Who reads
    what was never written, or is gone, finds bytes that are NaN in floating point, -1 in integers.
    """
