"""Summaries: numbers on the way of a training, as lines of JSON, written by replica 0 alone.

    {"step": 7, "tag": "loss", "value": 0.25}

A value that is not finite is written as a string, "nan", "inf" or "-inf", as JSON has no number
for it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from minidist import context
from minidist.errors import UsageError
from minidist.values import PerReplica


class SummaryWriter:
    """Appends to a file; a context manager that closes it.

    In a replica other than replica 0 nothing is written, so all may make the same calls. In
    cross-replica context, where nobody is replica 1, everything is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def scalar(self, tag: str, value: Any, step: int | None = None) -> None:
        """Write a number or a Tensor of one element; `step` is by default that of the strategy.

        Raises UsageError (a ValueError) for what is not one number, such as a PerReplica value in
        cross-replica context, and after close.
        """
        frame = context.frame()
        if frame.replica is not None and frame.replica.replica_id != 0:
            return
        if isinstance(value, PerReplica):
            if frame.replica is None:
                raise UsageError(
                    f"summary {tag!r} is a PerReplica value, of which there is one for each "
                    "replica; reduce it first"
                )
            value = value.get()
        if step is None:
            step = frame.strategy.step
        if self._file.closed:
            raise UsageError(f"the summary writer of {self._file.name} is closed; make a new one")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UsageError(f"summary {tag!r} takes one number, not {value!r}") from None
        line = {
            "step": step,
            "tag": tag,
            "value": number if math.isfinite(number) else str(number),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
