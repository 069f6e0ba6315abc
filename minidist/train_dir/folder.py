"""Folder: a training's checkpoints by step, as one process sees them and changes them."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minidist.checkpoint import shards
from minidist.checkpoint.opened import opened, strays
from minidist.errors import DataError, UsageError
from minidist.tensor_file import PARTIAL, parse_json, sync, unlink

METADATA = "minidist.train_dir"  # what our JSON is called in a checkpoint's metadata
LOCK = "lock"
STEP = r"step-(0|[1-9][0-9]{0,17})"
NAME = re.compile(rf"{STEP}\.safetensors({re.escape(shards.INDEX)})?")
PART = re.compile(rf"{STEP}(-[0-9a-f]+-[0-9]+-of-[0-9]+)?\.safetensors({re.escape(PARTIAL)})?")


class Saved(NamedTuple):
    """What a checkpoint was saved as: its step, and what was given as `extra`."""

    step: int
    extra: dict[str, Any]


def text(step: int, extra: Mapping[str, Any] | None) -> str:
    """Return what a checkpoint is to say it was saved as."""
    try:
        return json.dumps({"step": step, "extra": dict(extra or {})})
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra is something that JSON cannot hold: {error}") from None


class Folder:
    """What TrainDir does in the folder itself, which of several ranks the first one does for all.

    Raises DataError where the folder cannot be read or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def open(self) -> str:
        """Make the folder, take its lock, and tidy up; return what the lock's file says then."""
        try:
            _make(self.path)
            self._lock, held = _take_lock(self.path)
            self._release = weakref.finalize(self, os.close, self._lock)
            parts = [match for name in os.listdir(self.path) if (match := PART.fullmatch(name))]
            for match in parts:
                if match[3] and not match[2]:
                    (self.path / match[0]).unlink()
            for step in sorted({int(match[1]) for match in parts if match[2]}):
                for shard in strays(self.file(step)):
                    shard.unlink()
            return held
        except DataError:
            raise
        except OSError as error:
            raise DataError(
                f"{self.path}: no checkpoints can be saved there: {error.strerror or error}"
            ) from error

    def says(self) -> str | None:
        """Return what the lock's file says, None where there is none."""
        try:
            return (self.path / LOCK).read_text(errors="replace")
        except OSError:
            return None

    def close(self) -> None:
        """Let others write here. Closing twice is fine."""
        if self._lock is not None:
            self._release()
            self._lock = None

    def file(self, step: int) -> Path:
        """Return what the checkpoint of a step is called, or would be."""
        return self.path / f"step-{step}.safetensors"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in rising order."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        return sorted({int(match[1]) for name in names if (match := NAME.fullmatch(name))})

    def require_place(self, step: int) -> None:
        """Raise DataError where this process must not save, or not this step."""
        self._require_lock()
        newest = max(self.steps(), default=step)
        if newest > step:
            raise DataError(
                f"{self.path}: has a checkpoint of step {newest}, and step {step} would not be the "
                "newest: go on from it, move it away, or save to another folder"
            )

    def _require_lock(self) -> None:
        assert self._lock is not None
        try:
            if os.path.samestat(os.fstat(self._lock), (self.path / LOCK).stat()):
                return
        except OSError:
            pass
        raise DataError(f"{self.path}: was removed or replaced while checkpoints were saved to it")

    def choose(self, step: int | None) -> int:
        """Return a step, by default the newest, that has a checkpoint."""
        steps = self.steps()
        if step is None:
            if not steps:
                raise DataError(f"{self.path}: there is no checkpoint to load")
            return steps[-1]
        if step not in steps:
            has = ", ".join(map(str, steps)) or "none"
            raise DataError(f"{self.path}: no checkpoint of step {step} is there; it has: {has}")
        return step

    def said(self, step: int) -> Saved:
        """Return what a step's checkpoint says it was saved as."""
        base = self.file(step)
        said = _said(base)
        if said is not None and said.step != step:
            raise DataError(f"{base}: was saved as step {said.step}; give it its name back")
        return said or Saved(step, {})

    def advice(self, step: int) -> str | None:
        """Return what to do if a step's checkpoint is damaged, None if it is not."""
        if _is_whole(self.file(step)):
            return None
        older = [old for old in reversed(self.steps()) if old < step]
        whole = next((old for old in older if _is_whole(self.file(old))), None)
        if whole is None:
            return "No older checkpoint here is whole"
        index = shards.index_of(self.file(step))
        name = index.name if index.exists() else self.file(step).name
        return f"The one of step {whole} is whole: to go on from it, move {name} away"

    def keep(self, most: int) -> None:
        """Remove all but so many of the newest."""
        for step in self.steps()[:-most]:
            self._remove(step)

    def _remove(self, step: int) -> None:
        base = self.file(step)
        try:
            said = _said(base)
        except DataError:
            return  # nobody can say whose it is
        if said is None or said.step != step or base.is_symlink():
            return
        index = shards.index_of(base)
        if index.exists():
            unlink(base)
            shards.remove([index, *shards.shards_beside(base)])
        else:
            unlink(base)


def _make(path: Path) -> None:
    """Make a folder, and those above it, and bring their names to the disk."""
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: is no folder, so no checkpoints can be in it; name another")
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def _take_lock(path: Path) -> tuple[int, str]:
    """Return a descriptor that holds the folder's lock, and what its file says: who holds it."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    held = f"process {os.getpid()} on {platform.node()}\n{secrets.token_hex(8)}\n"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, held.encode(), 0)
        os.fsync(lock)  # so that other machines see it
    except BlockingIOError:
        holder = os.pread(lock, 300, 0).decode(errors="replace").split("\n")[0] or "unknown"
        os.close(lock)
        raise DataError(
            f"{path}: another training ({holder}) saves its checkpoints there; wait for its end, "
            "or name another folder"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock, held


def _said(base: Path) -> Saved | None:
    """Return what a checkpoint says it was saved as, None where `TrainDir` has not saved it."""
    with opened(base) as file:
        text = file.metadata.get(METADATA)
        if text is None:
            return None

        def error(byte: int, message: str) -> DataError:
            return DataError(f"{file.path}: in the metadata {METADATA!r}, {message}")

        said = parse_json(text.encode("utf-8", "surrogatepass"), error)
        if not isinstance(said, dict) or set(said) != {"step", "extra"}:
            raise error(0, "expected 'step' and 'extra'")
        return Saved(**said)


def _is_whole(base: Path) -> bool:
    """Whether a checkpoint has every byte that was saved, by the checksums saved with them."""
    try:
        with opened(base) as file:
            file.read({})
            return file.checksum is not None
    except DataError:
        return False
