"""Shards: a checkpoint in several files, and the index that makes one checkpoint of them.

    training.safetensors.index.json                         says what is where; written last
    training-5f0c9a6be21d-00001-of-00002.safetensors        some of the arrays
    training-5f0c9a6be21d-00002-of-00002.safetensors        the others

To save and to load it is called training.safetensors, as if it were one file. Where both are there,
that file and the index, the index counts: so a checkpoint of either kind is replaced by one of the
other in one moment, in which a name in the folder changes.

The index is that of the safetensors ecosystem: `weight_map` says of each array which shard it is
in. Under "minidist" it has the texts that are a single file's metadata, the checksum of each shard
(which the shard has too), and one of all this.

In a shard's name is a number of its save's own. What is saved so touches no file of the old
checkpoint until the index takes the old one's name; what then belongs to none is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minidist import tensor_file
from minidist.dtypes import HostArray
from minidist.errors import DataError
from minidist.tensor_file import PARTIAL, TensorFile

INDEX = ".index.json"  # ends the index's name, after the checkpoint's
SUFFIX = ".safetensors"
SHARD = "minidist.shard"  # in a shard's metadata: which shard of what it is
OURS = "minidist"  # what our part of an index is called


SHARED = "a checkpoint of several ranks must be in a folder that all their machines share"


# --- names --------------------------------------------------------------------------------------


def base(path: str | os.PathLike[str]) -> Path:
    """Return the path that a checkpoint is called by, of that path or of its index's."""
    path = Path(path)
    if path.name.endswith(INDEX) and path.name != INDEX:
        return path.with_name(path.name.removesuffix(INDEX))
    return path


def index_of(base: Path) -> Path:
    """Return where a checkpoint's index is, or would be."""
    return base.with_name(base.name + INDEX)


def shard_of(base: Path, save: str, number: int, count: int) -> Path:
    """Return where shard `number` of `count`, from 1, of a save is."""
    stem = base.name.removesuffix(SUFFIX)
    suffix = base.name[len(stem) :]
    return base.with_name(f"{stem}-{save}-{number:05}-of-{count:05}{suffix}")


def shards_beside(base: Path) -> list[Path]:
    """Return all shards of this checkpoint in its folder, of whichever save, half written or not.

    A file is a shard if its name is one's, and it says itself that it is; one that is half written
    has only its name.
    """
    stem = base.name.removesuffix(SUFFIX)
    suffix = base.name[len(stem) :]
    end = rf"-[0-9a-f]{{12}}-[0-9]{{5}}-of-[0-9]{{5}}{re.escape(suffix)}({re.escape(PARTIAL)})?"
    name = re.compile(re.escape(stem) + end)
    found = [base.with_name(other) for other in os.listdir(base.parent) if name.fullmatch(other)]
    return [path for path in sorted(found) if path.name.endswith(PARTIAL) or _says_shard(path)]


def _says_shard(path: Path) -> bool:
    try:
        with TensorFile(path) as file:
            return SHARD in file.metadata
    except DataError:
        return False


# --- writing ------------------------------------------------------------------------------------


def write_shard(
    base: Path,
    save: str,
    number: int,
    count: int,
    arrays: Mapping[str, HostArray],
    mode: int | None,
) -> dict[str, Any]:
    """Write a shard, and return what the index must know of it; see `index_text`."""
    path = shard_of(base, save, number, count)
    says = {SHARD: f"shard {number} of {count} of {base.name}"}
    checksum = tensor_file.write(path, arrays, says, mode)
    total = sum(array.nbytes for array in arrays.values())
    return {"file": path.name, "checksum": checksum, "arrays": sorted(arrays), "bytes": total}


def write_file(base: Path, arrays: Mapping[str, HostArray], texts: Mapping[str, str]) -> None:
    """Write a checkpoint that is one file, in place of whatever there is."""
    index = index_of(base)
    old = [index, *shards_beside(base)] if os.path.exists(index) else []
    tensor_file.write(base, arrays, texts, mode_of(base))
    remove(old)


def mode_of(base: Path) -> int | None:
    """Return who may read and write what is there: as a file's mode, None where nothing is."""
    for path in (index_of(base), base):
        if os.path.exists(path):
            return stat.S_IMODE(path.stat().st_mode)
    return None


def remove(old: Sequence[Path]) -> None:
    """Remove files that are in the way of a new checkpoint, or of none: the first one at once.

    Raises DataError where that is not possible.
    """
    for path in old[:1]:
        tensor_file.unlink(path)
        tensor_file.sync(path.parent)
    for path in old[1:]:
        tensor_file.unlink(path)


def index_text(shards: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> bytes:
    """Return an index of shards, of which `write_shard` has told."""
    index = {
        "metadata": {"total_size": sum(shard["bytes"] for shard in shards)},
        "weight_map": {name: shard["file"] for shard in shards for name in shard["arrays"]},
    }
    checksums = {shard["file"]: shard["checksum"] for shard in shards}
    checksum = digest(index["metadata"], index["weight_map"], checksums, texts)
    ours = {"checksum": checksum, "shards": checksums, "texts": dict(texts)}
    return json.dumps({**index, OURS: ours}, indent=2, sort_keys=True).encode() + b"\n"


def digest(*said: Any) -> str:
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()
