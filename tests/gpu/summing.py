"""What tests of NCCL share: its stand-in beside CuPy's, and rows whose sums are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from devices import cuda
from nccl_standin import World, nccl

from minidist.dtypes import as_dtype

SHAPES = [(), (0,), (5,), (7, 11), (64,)]
OLD = 22907  # a version in which every rank has a GPU of its own


@contextmanager
def world(libraries: Path, seed: int = 0, **how: Any) -> Iterator[World]:
    with cuda(libraries, seed) as cupy, nccl(cupy, seed=seed, **how) as found:
        yield found


def whole_numbers(n: int, dtype: str, shapes: Any = SHAPES, seed: int = 0) -> list[list[Any]]:
    """Return rows whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    low = 0 if dtype.startswith("u") else -9
    return [
        [rng.integers(low, 9, shape).astype(as_dtype(dtype)) for shape in shapes] for _ in range(n)
    ]


def on(devices: Any, rows: Any) -> list[list[Any]]:
    return [
        [device.copy_in(array) for array in row] for device, row in zip(devices, rows, strict=True)
    ]


def out(device: Any, row: Any) -> list[np.ndarray]:
    return [device.copy_out(array) for array in row]


def same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def sums(rows: Any, weights: Any = None, scale: float = 1.0) -> list[np.ndarray]:
    """Return Σ(w·x)·scale, exact for what `whole_numbers` gives."""
    weights = weights or [1.0] * len(rows)
    totals = []
    for column in zip(*rows, strict=True):
        dtype = column[0].dtype
        total = sum(w * x.astype("float64") for w, x in zip(weights, column, strict=True) if w)
        totals.append(np.asarray(total * scale).astype(dtype))
    return totals
