"""A file of named arrays: replaced whole or not at all, and read only where every word is right.

The format is safetensors: eight bytes with the length of a header, the header, the arrays' bytes.
The header is a JSON object that says of each array its dtype, its shape and where its bytes are,
and holds free text under "__metadata__". Nothing in a file is ever run.

Among that text `write` puts a checksum of all the rest: metadata, names, dtypes, shapes and bytes.
A file that has one is read only if it is right; files of other programs have none.

Whatever is wrong with a file becomes a DataError that names the file, the byte and what was
expected there. Memory is only taken for bytes that the file has.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from minidist.dtypes import HostArray
from minidist.errors import DataError, MinidistError

LENGTH = 8  # bytes that say how long the header is
HEADER_LIMIT = 100_000_000  # bytes; no reader of this format takes a longer header
RANK_LIMIT = 64  # NumPy's own
METADATA = "__metadata__"
PARTIAL = ".partial"  # ends the name of a file that is being written
CHECKSUM = "minidist.checksum"  # its key in the metadata
DTYPES = {  # NumPy's name of a dtype: the format's name, and the bytes of an element
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
}
NAMES = {theirs: (ours, size) for ours, (theirs, size) in DTYPES.items()}


# --- writing ------------------------------------------------------------------------------------


def write(
    path: Path,
    arrays: Mapping[str, HostArray],
    metadata: Mapping[str, str],
    mode: int | None = None,
) -> str:
    """Make `path` a file of these arrays, or leave it as it is; return the checksum.

    See `replacing` for how, for `mode`, and for what is raised.
    """
    from safetensors.numpy import save  # here, because most programs save nothing

    plain = {
        name: np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        for name, array in arrays.items()
    }
    digest = _digest(metadata, {name: (a.dtype.name, a.shape) for name, a in plain.items()})
    for name in sorted(plain):
        digest.update(plain[name].reshape(-1).view(np.uint8).data)
    data = save(plain, {**metadata, CHECKSUM: digest.hexdigest()})
    header, begin = _in_order(data)
    with replacing(path, mode=mode) as file:
        file.write(header)
        file.write(memoryview(data)[begin:])
    return digest.hexdigest()


@contextmanager
def replacing(
    path: Path, partial: Path | None = None, mode: int | None = None
) -> Iterator[IO[bytes]]:
    """Open the file that becomes `path` at the with statement's end, or never, where that fails.

    The new file is written beside the old one (as `partial`: by default its name with PARTIAL),
    brought to the disk, and then takes the old one's name, which no reader and no crash can see
    half done. mode: who may read it and write to it; by default who may the old one.
    Raises DataError where the disk refuses, or somebody else is writing the same file.
    """
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder, so no file can be saved there; name one in it")
        if partial is None:
            path = target(path)
            if path.exists() and not path.is_file():
                raise DataError(f"{path}: is a device or the like, and no file that can be saved")
            partial = path.with_name(path.name + PARTIAL)
        with _alone(partial) as file:
            yield file
            file.flush()
            if mode is None and path.exists():
                mode = stat.S_IMODE(path.stat().st_mode)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.replace(partial, path)
        sync(path.parent)
    except MinidistError:  # among them those that are an OSError
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be saved: {error.strerror or error}") from error


def target(path: Path) -> Path:
    """Return the file that a path means: of a link what it leads to, which is replaced, not it."""
    return path.resolve() if os.path.islink(path) else path


def _digest(
    metadata: Mapping[str, str], entries: Mapping[str, tuple[str, tuple[int, ...]]]
) -> hashlib.blake2b:
    """Return the checksum's beginning; the arrays' bytes, in the order of their names, go on it.

    BLAKE2b, since it is fast on every processor: a fraction of what writing or reading takes.
    """
    return hashlib.blake2b(json.dumps([metadata, entries], sort_keys=True).encode(), digest_size=16)


def _in_order(data: bytes) -> tuple[bytes, int]:
    """Return length and header with sorted metadata, and the byte of data where arrays begin.

    The library writes metadata in another order each time; the same state shall be the same file.
    """
    begin = LENGTH + int.from_bytes(data[:LENGTH], "little")
    header = json.loads(data[LENGTH:begin])
    header[METADATA] = dict(sorted(header[METADATA].items()))
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH)  # so that arrays begin at a multiple of 8
    return len(raw).to_bytes(LENGTH, "little") + raw, begin


@contextmanager
def _alone(partial: Path) -> Iterator[IO[bytes]]:
    """Open a file for the only writer; where that fails, the file is gone.

    The lock ends with the process that holds it, so what a killed one left is simply taken over.
    Between opening and locking, another writer may have given the file its final name: then what
    was opened is no longer the partial file, and must not be touched.
    """
    with partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), partial.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise DataError(
                f"{partial}: somebody else is saving to this file now; save to another one"
            ) from None
        try:
            file.truncate(0)
            yield file
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def unlink(path: Path) -> None:
    """Remove a file, if it is there. Raises DataError where that is not possible."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be removed: {error.strerror or error}") from error


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ------------------------------------------------------------------------------------


def open_to_read(path: Path) -> FileIO:
    """Open a file without a buffer. Raises DataError where there is none that can be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise DataError(f"{path}: is no file that could be read, but a folder or a device")
        return path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """What the header says of one array; `begin` and `end` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A file whose header has been checked: `entries` by name, `metadata`, and `checksum` if any.

    A context manager. The arrays fill the rest of the file, without a gap and without overlap.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_to_read(path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def error(self, byte: int, message: str) -> DataError:
        """Return the DataError that says what is wrong at that byte of this file."""
        return DataError(f"{self.path}: byte {byte}: {message}")

    def wrong(self, message: str) -> DataError:
        """Return the DataError that says what is wrong with the metadata."""
        return self.error(LENGTH, message)

    def read(self, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, HostArray]:
        """Return the arrays of these names, whose dtypes in the file must be these.

        Where there is a checksum, all arrays are read; raises DataError if it is wrong.
        They are read and not mapped: a mapped file that somebody cuts off kills the process.
        """
        entries = {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}
        digest = _digest(self.metadata, entries)
        arrays = {}
        for name in sorted(dtypes if self.checksum is None else self.entries):
            entry = self.entries[name]
            raw = self._bytes(entry.begin, entry.end - entry.begin, f"array {name!r}")
            if self.checksum is not None:
                digest.update(raw.data)
            if name in dtypes:
                self._check_bool(name, entry, raw)
                arrays[name] = raw.view(dtypes[name]).reshape(entry.shape)
        if self.checksum not in (None, digest.hexdigest()):
            raise DataError(
                f"{self.path}: the file is damaged: it has not the bytes that were saved, by the "
                "checksum saved with them; load another copy of it, or an earlier one"
            )
        return arrays

    def _check_bool(self, name: str, entry: Entry, raw: np.ndarray[Any, Any]) -> None:
        if entry.dtype == "bool" and (wrong := np.flatnonzero(raw > 1)).size:
            raise self.error(
                entry.begin + int(wrong[0]), f"expected 0 or 1 in array {name!r}, which is bool"
            )

    def _bytes(self, start: int, count: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if start + count > self._size:
            raise self._ends(self._size, start, count, what)
        data = np.empty(count, np.uint8)
        done = 0
        try:
            self._file.seek(start)
            while done < count:
                got = self._file.readinto(data.data[done:])
                if not got:
                    raise self._ends(start + done, start, count, what)
                done += got
        except DataError:
            raise
        except OSError as error:
            raise self.error(start + done, f"cannot be read: {error.strerror or error}") from error
        return data

    def _ends(self, byte: int, start: int, count: int, what: str) -> DataError:
        return self.error(
            byte, f"the file ends before {what}: expected {count} bytes from byte {start}"
        )

    def _read_header(self) -> None:
        length = int(self._bytes(0, LENGTH, "the header's length").view("<u8")[0])
        if length > HEADER_LIMIT:
            raise self.error(
                0,
                f"expected the length of a header, at most {HEADER_LIMIT} bytes, and not {length}; "
                "is this a safetensors file?",
            )
        raw = self._bytes(LENGTH, length, "the header").tobytes()
        if raw[:1] != b"{":
            raise self.error(
                LENGTH, f"expected '{{', with which a header begins, and not {raw[:1]!r}"
            )
        header = parse_json(raw, lambda byte, message: self.error(LENGTH + byte, message))
        self.metadata = self._metadata(header.pop(METADATA, {}))
        self.checksum = self.metadata.pop(CHECKSUM, None)
        data = LENGTH + length
        self.entries = {name: self._entry(name, said, data) for name, said in header.items()}
        self._check_places(data)

    def _check_places(self, position: int) -> None:
        in_order = sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end))
        for name, entry in in_order:
            if entry.begin != position:
                raise self.error(
                    position, f"expected array {name!r} to begin here, and not at {entry.begin}"
                )
            if entry.end > self._size:
                raise self._ends(
                    self._size, entry.begin, entry.end - entry.begin, f"array {name!r} does"
                )
            position = entry.end
        if position != self._size:
            raise self.error(
                position, f"expected the end of the file, but {self._size - position} bytes follow"
            )

    def _metadata(self, said: Any) -> dict[str, str]:
        if not isinstance(said, dict) or not all(isinstance(text, str) for text in said.values()):
            raise self.error(LENGTH, f"expected an object of texts as {METADATA}")
        return said

    def _entry(self, name: str, said: Any, data: int) -> Entry:
        where = f"expected of array {name[:200]!r}"
        if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
            raise self.error(LENGTH, f"{where} dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
        if not isinstance(dtype, str) or dtype not in NAMES:
            raise self.error(LENGTH, f"{where} a dtype out of {', '.join(NAMES)}")
        if not _naturals(shape) or len(shape) > RANK_LIMIT:
            raise self.error(LENGTH, f"{where} a shape of at most {RANK_LIMIT} lengths, none < 0")
        if not _naturals(offsets) or len(offsets) != 2:
            raise self.error(LENGTH, f"{where} two data_offsets, none < 0")
        ours, size = NAMES[dtype]
        begin, end = offsets
        if end - begin != prod(shape) * size:
            raise self.error(
                LENGTH, f"{where} the bytes of {dtype}{shape}, and not {end - begin} bytes"
            )
        return Entry(ours, tuple(shape), data + begin, data + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(is_natural(item) for item in value)


def is_natural(value: Any, bits: int = 63) -> bool:
    """Whether a value from JSON is a whole number of at least 0 that fits into so many bits."""
    return type(value) is int and 0 <= value < 2**bits


def parse_json(raw: bytes, error: Callable[[int, str], DataError]) -> Any:
    """Return what JSON says; `error(byte, message)` makes the exception where it is none.

    An object with two values for one key is refused too: readers differ in which they take.
    """
    try:
        text = raw.decode()
        return json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as cause:
        raise error(cause.start, "expected UTF-8") from cause
    except json.JSONDecodeError as cause:
        byte = len(text[: cause.pos].encode())
        raise error(byte, f"expected JSON ({cause.msg})") from cause
    except RecursionError as cause:
        raise error(0, "expected JSON of a few levels, and not of thousands") from cause
    except ValueError as cause:  # a number of thousands of digits, or _object's
        raise error(0, f"expected other JSON: {cause}") from cause


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} stands twice in one object")
    return result
