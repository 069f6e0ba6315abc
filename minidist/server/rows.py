"""Rows: which rows of tables have changed since each worker was told of their values.

A table is a variable of which gradients come by rows. Where an update changes only these rows, an
answer needs to have no others, but for those that other workers have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from minidist.device import Array
from minidist.variable import Variable

INDEX = 8  # bytes that tell which row follows
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Changed:
    """Keeps account for all tables of a ps.

    fresh: whether workers know all of a variable until the first of its gradients comes by rows.
    """

    def __init__(self, workers: Iterable[int], *, fresh: bool) -> None:
        self._workers = tuple(workers)
        self._fresh = fresh
        self._masks: dict[Variable, dict[int, Mask]] = {}

    def rows(self, variable: Variable, rows: Array) -> None:
        """Note that some rows have changed."""
        masks = self._masks.get(variable)
        if masks is None:
            first = np.full(variable.shape[0], not self._fresh)
            masks = self._masks[variable] = {worker: first.copy() for worker in self._workers}
        for mask in masks.values():
            mask[rows] = True

    def whole(self, variable: Variable) -> None:
        """Note that all of a variable may have changed."""
        for mask in self._masks.get(variable, {}).values():
            mask[:] = True

    def everything(self) -> None:
        """Note that all of every variable may have changed."""
        for variable in self._masks:
            self.whole(variable)

    def news(self, variable: Variable, worker: int) -> Array | None:
        """Return which rows a worker does not know, None for all; it is told of them now."""
        mask = self._masks.get(variable, {}).get(worker)
        if mask is None:
            return None
        rows = np.flatnonzero(mask)
        mask[:] = False
        row = variable.size // len(mask) * variable.dtype.itemsize
        return rows if len(rows) * (INDEX + row) < len(mask) * row else None

    def by_rows(self, variable: Variable) -> bool:
        """Whether different workers may have to be told of different rows."""
        return variable in self._masks
