"""SummaryWriter: who writes, at which step, and whether it is a number at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from minidist import context
from minidist.errors import UsageError
from minidist.summary.base import SummaryFile
from minidist.summary.event_file import EventFile
from minidist.summary.histogram import Histogram
from minidist.summary.json_lines import JsonLines
from minidist.summary.table import Table
from minidist.values import PerReplica


def _format(path: Path) -> type[SummaryFile]:
    if "tfevents" in path.name:
        return EventFile
    return Table if path.suffix == ".csv" else JsonLines


class SummaryWriter:
    """Appends to a file, in the format that its name says; a context manager that closes it.

    In a replica other than replica 0 nothing is written, so all may make the same calls. In
    cross-replica context, where nobody is replica 1, everything is.

    resume_from: the step from which the training goes on; what the file has of later ones is cut
    off. Raises DataError where the file cannot be read or written, or is another program's.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_from: int | None = None) -> None:
        path = Path(path)
        self._file = _format(path)(path, resume_from)

    def scalar(self, tag: str, value: Any, step: int | None = None) -> None:
        """Write a number or a Tensor of one element; `step` is by default that of the strategy.

        Raises UsageError (a ValueError) for what is not one number, such as a PerReplica value in
        cross-replica context, and after close.
        """
        if _writes():
            value = self._own(tag, value)
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise UsageError(f"summary {tag!r} takes one number, not {value!r}") from None
            self._file.scalar(_step(step), tag, number)

    def histogram(self, tag: str, values: Any, step: int | None = None) -> None:
        """Write how the numbers of an array, Tensor or variable of any shape are distributed.

        Raises UsageError (a ValueError) as `scalar` does.
        """
        if _writes():
            values = self._own(tag, values)
            try:
                histogram = Histogram.of(values)
            except (TypeError, ValueError):
                raise UsageError(f"summary {tag!r} takes numbers, not {values!r}") from None
            self._file.histogram(_step(step), tag, histogram)

    def _own(self, tag: str, value: Any) -> Any:
        """Return this replica's part of a value, if the file is still open for it."""
        if self._file.closed:
            raise UsageError(f"the summary writer of {self._file.path} is closed; make a new one")
        if not isinstance(value, PerReplica):
            return value
        if context.in_cross_replica_context():
            raise UsageError(
                f"summary {tag!r} is a PerReplica value, of which there is one for each replica; "
                "reduce it first"
            )
        return value.get()

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _writes() -> bool:
    replica = context.get_replica_context()
    return replica is None or replica.replica_id == 0


def _step(step: int | None) -> int:
    return context.get_strategy().step if step is None else step
