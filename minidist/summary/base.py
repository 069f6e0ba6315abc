"""SummaryFile: one format of summaries; it is opened where an earlier training has left it."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minidist.errors import DataError
from minidist.summary.histogram import Histogram


class SummaryFile(ABC):
    """A file to which numbers by step and tag are appended.

    With `resume_from` all of later steps is cut off, and in any case what a killed writer has not
    brought to its end. Raises DataError where the file cannot be read or written.
    """

    def __init__(self, path: Path, resume_from: int | None) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is no file to which summaries could be appended")
        with self._saying_why():
            old = path.read_bytes() if path.exists() else b""
            kept = self._kept(old, resume_from)
            if kept != old or not path.exists():
                self._replace(kept)
            self._file = path.open("r+b", buffering=0)

    @abstractmethod
    def scalar(self, step: int, tag: str, value: float) -> None:
        """Write a number, which may be NaN or infinite."""

    @abstractmethod
    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        """Write how the numbers of an array are distributed."""

    @abstractmethod
    def _kept(self, old: bytes, resume_from: int | None) -> bytes:
        """Return what stays of what the file holds on opening, and note where to go on."""

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def _put(self, data: bytes, begin: int | None = None) -> int:
        """Let the file end with these bytes, from `begin` or else its end on; return `begin`.

        Where the disk takes only a part of them, it ends at `begin`.
        """
        with self._saying_why():
            if begin is not None:
                self._file.truncate(begin)
            begin = self._file.seek(0, os.SEEK_END)
            left = memoryview(data)
            try:
                while left:
                    left = left[self._file.write(left) :]
            finally:
                if left:
                    self._file.truncate(begin)
            return begin

    def _replace(self, data: bytes) -> None:
        """Let the file hold these bytes, of which no crash leaves a part."""
        path = self.path.resolve()  # what a link leads to is replaced, not the link
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @contextmanager
    def _saying_why(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.path}: summaries cannot be written: {error.strerror or error}"
            ) from error
