"""A TFRecord file, whose records are found by their headers and read by number."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import numpy as np

from minidist import tfrecord
from minidist.data.files import GZIP_MAGIC, LIMIT
from minidist.errors import DataError, MalformedError
from minidist.tensor_file import open_to_read


class Shard:
    """The records of a file, by number from 0. Any number of threads may read at a time.

    `offsets` int64 [n + 1] says where each begins, and where the last one ends. A header that is
    damaged, or a file that ends within a record, hides what follows: `damage` says what is wrong
    there, and is None of a file that is whole.

    Raises DataError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        offsets = [0]
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            while offsets[-1] < size:
                try:
                    offsets.append(self._end(file, offsets[-1], size))
                except MalformedError as error:
                    self.damage = str(error)
                    break
        self.offsets = np.array(offsets, np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, number: int, file: FileIO) -> memoryview:
        """Return the data of a record, read from the file, which the caller has opened.

        Raises MalformedError where they are damaged, DataError where they cannot be read.
        """
        begin, end = map(int, self.offsets[number : number + 2])
        return tfrecord.data(self._bytes(file, begin, end - begin))

    def error(self, number: int, reason: object) -> DataError:
        """Return the DataError that says what is wrong with a record, or behind the last one."""
        return DataError(f"{self.path}: byte {self.offsets[number]}: record {number}: {reason}")

    def _end(self, file: FileIO, begin: int, size: int) -> int:
        """Return where the record ends that begins there; MalformedError if its header is wrong."""
        if begin + tfrecord.HEADER > size:
            raise MalformedError(f"the file ends in its header, of {tfrecord.HEADER} bytes")
        header = self._bytes(file, begin, tfrecord.HEADER)
        if begin == 0 and header.startswith(GZIP_MAGIC):
            raise MalformedError("the file is compressed: unpack it with gunzip")
        length = tfrecord.length(header)
        if length > LIMIT:
            raise MalformedError(f"it has {length} bytes, and no record above {LIMIT} is read")
        end = begin + tfrecord.HEADER + length + tfrecord.FOOTER
        if end > size:
            raise MalformedError(f"the file ends in it, whose data are {length} bytes")
        return end

    def _bytes(self, file: FileIO, begin: int, count: int) -> bytes:
        data = b""
        while len(data) < count:  # some file systems give less than is asked for
            try:
                more = os.pread(file.fileno(), count - len(data), begin + len(data))
            except OSError as error:
                raise DataError(
                    f"{self.path}: byte {begin}: cannot be read: {error.strerror or error}"
                ) from error
            if not more:
                raise DataError(
                    f"{self.path}: byte {begin + len(data)}: the file ends here and did not when "
                    "its records were looked for: let nobody change it while it is read"
                )
            data = data + more if data else more
        return data
