"""Bytes of a data file, their number known before any memory is taken for them.

Whatever is wrong with a file becomes a DataError that names the file, the byte and what was
expected there. Bytes of a gzip file are counted after decompression.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from minidist.errors import DataError
from minidist.tensor_file import open_to_read

GZIP_MAGIC = b"\x1f\x8b"
LIMIT = 2**30  # bytes of what is read in one piece: an image, a record
DEFLATE_LIMIT = 1032  # no deflate stream unpacks to more than this many times its size


def folder(data_dir: str) -> Path:
    """Return data_dir as a path; DataError when it is not a folder."""
    path = Path(data_dir)
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise DataError(f"{data_dir}: data_dir cannot be read: {error.strerror}") from None
    if not is_folder:
        what = "is not a folder" if path.exists() else "does not exist"
        raise DataError(f"{path}: data_dir {what}: give the folder that holds the data files")
    if not os.access(path, os.R_OK | os.X_OK):
        raise DataError(f"{path}: data_dir cannot be read by this user: change its permissions")
    return path


def whole(path: Path) -> bytes:
    """Return what a file holds. Raises DataError where it cannot be read, or is above LIMIT."""
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LIMIT:
            raise DataError(f"{path}: expected at most {LIMIT} bytes, but there are {size}")
        try:
            return file.readall()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


class Reader:
    """Read a file, plain or gzip (its first two bytes say which), strictly front to back.

    A context manager. `position` is the offset of the next byte.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        with self._failures():
            self._file = path.open("rb")
            self._stream: io.BufferedIOBase = self._file
            size = os.fstat(self._file.fileno()).st_size
            self.compressed = self._file.read(2) == GZIP_MAGIC
            self._file.seek(0)
        if self.compressed:
            self._stream = gzip.GzipFile(fileobj=self._file)
            size *= DEFLATE_LIMIT
        self._limit = size

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.close()
        self._file.close()

    def error(self, byte: int, message: str) -> DataError:
        """Return the DataError that says what is wrong at that byte of this file."""
        place = f"byte {byte}" + (" after decompression" if self.compressed else "")
        return DataError(f"{self.path}: {place}: {message}")

    def read(self, count: int, what: str) -> NDArray[np.uint8]:
        """Return the next `count` bytes, uint8 [count]; `what` names them in errors."""
        start = self.position
        if start + count > self._limit:
            end = "ends before" if not self.compressed else "is too small to hold"
            at = start if self.compressed else self._limit
            raise self.error(at, f"the file {end} {what}: expected {count} bytes from byte {start}")
        data = np.empty(count, np.uint8)
        with self._failures():
            while self.position < start + count:
                got = self._stream.readinto(data.data[self.position - start :])
                if not got:
                    raise self.error(
                        self.position,
                        f"the file ends before {what}: expected {count} bytes from byte {start}",
                    )
                self.position += got
        return data

    def finish(self) -> None:
        """Check that nothing follows what was read (and, of gzip, that its checksum is right)."""
        with self._failures():
            rest = self._stream.read(1)
        if rest:
            raise self.error(self.position, "expected the end of the file, but more bytes follow")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{self.path}: there is no such file") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise self.error(
                self.position, f"the gzip data are damaged ({error}): fetch the file again"
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from error
