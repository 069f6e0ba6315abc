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
        counts, edges = np.histogram(finite, BUCKETS)
        return cls(
            statistics,
            tuple(edges.tolist()),
            tuple(counts.tolist()),
            float(finite.sum()),
            float(np.square(finite).sum()),
        )
