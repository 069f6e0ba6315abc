"""Opened: a checkpoint to be read, be it one file or an index with its shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minidist.checkpoint.shards import OURS, SHARD, digest, index_of, shards_beside
from minidist.dtypes import HostArray
from minidist.errors import DataError
from minidist.tensor_file import HEADER_LIMIT, Entry, TensorFile, open_to_read, parse_json


class ShardedFile:
    """An index with its shards, which is read as a TensorFile is.

    everything: whether shards are looked at too of which no array is wanted.
    Raises DataError for what is wrong with the index or with the header of a shard; for shards that
    are missing, or of another save.
    """

    def __init__(self, path: Path, *, everything: bool = True) -> None:
        self.path = path
        self._everything = everything
        self.metadata: dict[str, str] = {}
        self.checksum: str | None = None
        self.entries: dict[str, Entry] = {}
        self._shards: list[TensorFile] = []
        weight_map, checksums = self._opened(parse_json(self._text(), self.error))
        try:
            for name in sorted(set(weight_map.values())):
                self._shards.append(self._shard(name, weight_map, checksums))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> ShardedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        for shard in self._shards:
            shard.__exit__()

    def error(self, byte: int, message: str) -> DataError:
        """Return the DataError that says what is wrong at that byte of the index."""
        return DataError(f"{self.path}: byte {byte}: {message}")

    def wrong(self, message: str) -> DataError:
        """Return the DataError that says what is wrong with the index."""
        return DataError(f"{self.path}: {message}")

    def read(self, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, HostArray]:
        """Return the arrays of these names, whose dtypes in the shards must be these.

        Shards with a checksum are read as a whole. Raises a DataError that names all that are
        damaged.
        """
        arrays: dict[str, HostArray] = {}
        damaged = []
        for shard in self._shards:
            of_it = {name: dtype for name, dtype in dtypes.items() if name in shard.entries}
            if of_it or self._everything:
                try:
                    arrays.update(shard.read(of_it))
                except DataError as error:
                    damaged.append(error)
        if damaged:
            raise DataError("; ".join(map(str, damaged))) from damaged[0]
        return arrays

    @property
    def files(self) -> list[Path]:
        """The shards."""
        return [shard.path for shard in self._shards]

    def _text(self) -> bytes:
        with open_to_read(self.path) as file:
            if os.fstat(file.fileno()).st_size > HEADER_LIMIT:
                raise self.wrong(f"expected an index of at most {HEADER_LIMIT} bytes")
            try:
                return file.read()
            except OSError as error:
                raise self.wrong(f"cannot be read: {error.strerror or error}") from error

    def _opened(self, said: Any) -> tuple[dict[str, str], dict[str, str] | None]:
        """Return the weight map and the shards' checksums, if this index is one of ours."""
        if not isinstance(said, dict) or not _texts(said.get("weight_map")):
            raise self.wrong("expected an object that has texts by the names of arrays: weight_map")
        weight_map = said["weight_map"]
        for name in set(weight_map.values()):
            if name != Path(name).name or "\0" in name or name in ("", ".", ".."):
                raise self.wrong(
                    f"expected shards that are files in the same folder, and not {name[:200]!r}"
                )
        ours = said.get(OURS)
        if ours is None:
            return weight_map, None
        if not isinstance(ours, dict) or set(ours) != {"checksum", "shards", "texts"}:
            raise self.wrong(f"expected checksum, shards and texts as {OURS!r}, and nothing else")
        shards, texts = ours["shards"], ours["texts"]
        if not _texts(shards) or not _texts(texts):
            raise self.wrong(f"expected objects of texts as shards and texts of {OURS!r}")
        if ours["checksum"] != digest(said.get("metadata"), weight_map, shards, texts):
            raise self.wrong(
                "the index is damaged: it does not say what was saved, by the checksum saved with "
                "it; load another copy of it, or an earlier checkpoint"
            )
        if set(shards) != set(weight_map.values()):
            raise self.wrong("expected the checksum of each shard, and of no other file")
        self.metadata, self.checksum = texts, ours["checksum"]
        return weight_map, shards

    def _shard(
        self, name: str, weight_map: Mapping[str, str], checksums: Mapping[str, str] | None
    ) -> TensorFile:
        path = self.path.with_name(name)
        if not os.path.exists(path):
            raise self.wrong(
                f"its shard {name[:200]!r} is missing; all its shards must be beside it"
            )
        shard = TensorFile(path)
        try:
            if checksums is None and SHARD in shard.metadata:
                raise self.wrong(f"expected {OURS!r}, which an index of {name} has")
            if checksums is not None and shard.checksum != checksums[name]:
                raise DataError(
                    f"{path}: is damaged, or of another save: it has not the checksum that "
                    f"{self.path.name} says; load another copy of it, or an earlier checkpoint"
                )
            there = {array for array, file in weight_map.items() if file == name}
            if different := sorted(there ^ set(shard.entries)):
                raise self.wrong(
                    f"expected the arrays that are in {name}; in only one of the two is "
                    f"{different[0][:200]!r}"
                )
        except BaseException:
            shard.__exit__()
            raise
        self.entries.update(shard.entries)
        return shard


Opened = TensorFile | ShardedFile


def is_there(path: Path) -> bool:
    """Whether there is anything to open."""
    return os.path.exists(index_of(path)) or os.path.exists(path)


def opened(path: Path, *, everything: bool = True) -> Opened:
    """Open a checkpoint by its base, be it one file or an index with its shards.

    Raises DataError as these do. One that is replaced meanwhile is opened anew.
    """
    index = index_of(path)
    while True:
        before = _identity(index)
        try:
            if before is None:
                return TensorFile(path)
            return ShardedFile(index, everything=everything)
        except DataError:
            if _identity(index) == before:
                raise


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _texts(said: Any) -> bool:
    return isinstance(said, dict) and all(isinstance(text, str) for text in said.values())


def strays(base: Path) -> list[Path]:
    """Return the shards beside a checkpoint that its index does not name.

    None where there is an index that cannot be read: then nobody can say.
    """
    named: list[Path] = []
    if os.path.exists(index_of(base)):
        try:
            with ShardedFile(index_of(base)) as file:
                named = file.files
        except DataError:
            return []
    return [path for path in shards_beside(base) if path not in named]
