"""Histogram: how the numbers of an array are distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

QUANTILES = (5, 25, 50, 75, 95)  # percent
BUCKETS = 30


@dataclass(frozen=True)
class Histogram:
    """An array's finite numbers, and how many others it has; all in float64.

    statistics: "count", "nonfinite", "min", "5%", "25%", "50%", "75%", "95%", "max", "mean". A
        quantile between two numbers is interpolated. Without any finite number all but the counts
        are NaN.
    edges, counts: counts[i] of the numbers are from edges[i] to just below edges[i + 1] (the
        last including it), in buckets of one width.
    """

    statistics: dict[str, float]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    total_squares: float

    @classmethod
    def of(cls, values: Any) -> Histogram:
        """Count what there is in an array of any shape. Raises ValueError for no numbers."""
        array = np.asarray(values).astype(np.float64).ravel()
        finite = array[np.isfinite(array)]
        counted = {"count": finite.size, "nonfinite": array.size - finite.size}
        if not finite.size:
            names = ("min", *(f"{percent}%" for percent in QUANTILES), "max", "mean")
            return cls({**counted, **dict.fromkeys(names, float("nan"))}, (), (), 0.0, 0.0)
        quantiles = np.percentile(finite, QUANTILES).tolist()
        statistics = {
            **counted,
            "min": float(finite.min()),
            **{f"{percent}%": value for percent, value in zip(QUANTILES, quantiles, strict=True)},
            "max": float(finite.max()),
            "mean": float(finite.mean()),
        }
        counts, edges = np.histogram(finite, _edges(statistics["min"], statistics["max"]))
        return cls(
            statistics,
            tuple(edges.tolist()),
            tuple(counts.tolist()),
            float(finite.sum()),
            float(np.square(finite).sum()),
        )


def _edges(low: float, high: float) -> int | np.ndarray[Any, Any]:
    """Return where the buckets end, or how many there are where NumPy can tell by itself.

    It refuses ranges that float64 cannot divide (neighbouring numbers) or not subtract (huge ones
    of both signs). There some buckets have no width, and are empty.
    """
    finest = np.spacing(max(abs(low), abs(high)))
    if low == high and finest < 0.5 / BUCKETS:
        return BUCKETS  # from half a unit below to half a unit above
    if 2 * finest < high / BUCKETS - low / BUCKETS and np.isfinite(high - low):
        return BUCKETS
    part = np.linspace(0, 1, BUCKETS + 1)
    return np.maximum.accumulate(np.clip(low * (1 - part) + high * part, low, high))
