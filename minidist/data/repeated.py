"""One batch fed again and again, as if reading took no time: what an input costs shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

from minidist.data.batches import Batches
from minidist.input.rounds import Part


class Repeated:
    """The first of some batches without an end. It is read anew by each iteration."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.__qualname__ = type(batches).__qualname__

    def __iter__(self) -> Iterator[Any]:
        return (part.values for part in self.parts(slice))

    def parts(self, rows: Callable[[int], slice]) -> Iterable[Part]:
        """Return an iterable of parts: `rows` says which rows of so many examples are in them."""
        return repeat(next(iter(self._batches.parts(rows))))
