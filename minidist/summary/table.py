"""Summaries as a table in CSV: a row for each step, a column for each tag.

    step,loss,learning_rate
    1,0.75,0.1
    2,0.5,0.1

Columns stand in the order in which their tags first came. When a new one comes later, the file is
replaced by one with a column more, which is empty in the rows before. A histogram has a column for
each of its statistics, "kernel/mean" and so on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping

from minidist.errors import DataError, UsageError
from minidist.summary.base import SummaryFile
from minidist.summary.histogram import Histogram


class Table(SummaryFile):
    """Rows by rising steps. The last row is written anew with each of its numbers.

    Raises UsageError (a ValueError) for a step before that of the last row.
    """

    _columns: list[str]
    _step: int | None  # of the last row
    _row: dict[str, str]  # the last one, by column
    _begin: int | None  # where it begins; None: at the end, as it has not been written

    def scalar(self, step: int, tag: str, value: float) -> None:
        self._set(step, {tag: repr(value)})

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        statistics = histogram.statistics.items()
        self._set(step, {f"{tag}/{name}": repr(value) for name, value in statistics})

    def _set(self, step: int, cells: Mapping[str, str]) -> None:
        if self._step is not None and step < self._step:
            raise UsageError(
                f"{self.path} has a row of step {self._step} already, and rows are by rising "
                f"steps, so nothing of step {step} can follow; a training that goes on from a "
                "saved step says so with resume_from"
            )
        if step != self._step:
            self._step, self._row, self._begin = step, {"step": str(step)}, None
        self._row.update(cells)
        if new := [tag for tag in cells if tag not in self._columns]:
            self._widen(new)
        line = _line(self._row.get(column, "") for column in self._columns)
        self._begin = self._put(line, self._begin)

    def _widen(self, new: list[str]) -> None:
        """Give all rows that there are these columns too."""
        with self._saying_why():
            _, *rows = _parse(self.path.read_bytes()) or [[]]
            self._columns += new
            if self._begin is not None:  # the last row is written again by who calls this
                rows.pop()
            rows = [row + [""] * (len(self._columns) - len(row)) for row in rows]
            data = b"".join(map(_line, [self._columns, *rows]))
            self._replace(data)
            self._file.close()
            self._file = self.path.open("r+b", buffering=0)
            self._begin = len(data)

    def _kept(self, old: bytes, resume_from: int | None) -> bytes:
        self._columns, self._row = ["step"], {}
        self._step = self._begin = None
        if not old.endswith(b"\n"):
            old = old[: old.rfind(b"\n") + 1]
        if not old:
            return b""
        self._columns, *rows = _parse(old) or [[]]
        if self._columns[:1] != ["step"]:
            raise DataError(f"{self.path}: is no table of summaries, whose first column is 'step'")
        try:
            steps = [int(row[0]) for row in rows]
        except (IndexError, ValueError):
            raise DataError(
                f"{self.path}: is no table of summaries, whose rows begin with a step"
            ) from None
        if resume_from is not None:
            rows = [row for row, step in zip(rows, steps, strict=True) if step <= resume_from]
            steps = [step for step in steps if step <= resume_from]
        lines = list(map(_line, [self._columns, *rows]))
        if rows:
            self._step = steps[-1]
            self._row = dict(zip(self._columns, rows[-1], strict=False))
            self._begin = sum(map(len, lines[:-1]))
        return b"".join(lines)


def _parse(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(errors="replace"), newline="")))


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
