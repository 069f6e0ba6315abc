"""A training's folder: a checkpoint for each saved step, of which the newest few are kept.

    step-100.safetensors    a checkpoint (minidist.checkpoint): whole, or not there at all
    lock                    whoever writes here holds it, and it says which process that is

The listing of the folder is the index, so no crash can bring the two apart. The lock ends with the
process that holds it; a file of that name that nobody holds does no harm.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import weakref
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from minidist import checkpoint
from minidist.errors import DataError, UsageError
from minidist.optim import Optimizer
from minidist.tensor_file import PARTIAL, TensorFile, is_natural, parse_json, sync

METADATA = "minidist.train_dir"  # what our JSON is called in a checkpoint's metadata
LOCK = "lock"
NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})\.safetensors")


class Saved(NamedTuple):
    """What a checkpoint was saved as: its step, and what was given as `extra`."""

    step: int
    extra: dict[str, Any]


class TrainDir:
    """A folder of checkpoints by step; a context manager that closes it.

    Opening it makes the folder where there is none, takes its lock until `close`, and removes what
    a killed save has left. With write=False nothing of that happens, and `save` is refused: so one
    process can evaluate what another trains.

    keep: after a save only so many of the newest checkpoints stay; None keeps all. Removed is only
    what says of itself that it was saved here, and only when the newer one is on the disk.

    Raises UsageError (a ValueError) for a `keep` below 1, DataError for a path that is no folder or
    may not be written to, and where somebody else writes there.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int | None = 5, write: bool = True
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep must be at least 1, or None for all, but it is {keep}")
        self.path = Path(path)
        self.keep = keep
        self._lock: int | None = None
        if not write:
            self.steps()  # so that a folder that is not there is an error now
            return
        try:
            _make(self.path)
            self._lock = _take_lock(self.path)
            self._release = weakref.finalize(self, os.close, self._lock)
            for name in os.listdir(self.path):
                if name.endswith(PARTIAL) and NAME.fullmatch(name.removesuffix(PARTIAL)):
                    (self.path / name).unlink()
        except DataError:
            raise
        except OSError as error:
            self.close()
            raise DataError(
                f"{path}: no checkpoints can be saved there: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Let others write here. Closing twice is fine."""
        if self._lock is not None:
            self._release()
            self._lock = None

    def __enter__(self) -> TrainDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- what there is

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have a checkpoint, in rising order."""
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        return tuple(sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name))))

    def newest(self) -> int | None:
        """Return the last step that has a checkpoint, None where there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def file(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self.path / f"step-{step}.safetensors"

    # --- saving and loading

    def save(
        self,
        step: int,
        variables: Any,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a training as `md.save` does, as that of a step; return the file.

        extra: what else shall be known on loading, as JSON can hold it. A checkpoint of the same
        step is replaced. When this returns, the file is on the disk and old ones are gone.
        Raises UsageError (a ValueError) for a step that is no whole number of at least 0, DataError
        where there are newer steps than this one already (another training's, or those before the
        one that was gone on from), and whatever `md.save` raises; the older ones stay then.
        """
        step = index(step)
        if not is_natural(step, bits=59):
            raise UsageError(f"a step is a whole number of at least 0, not {step}")
        self._require_lock()
        newest = self.newest()
        if newest is not None and newest > step:
            raise DataError(
                f"{self.path}: has a checkpoint of step {newest}, and step {step} would not be the "
                "newest: go on from it, move it away, or save to another folder"
            )
        try:
            text = json.dumps({"step": step, "extra": dict(extra or {})})
        except (TypeError, ValueError) as error:
            raise UsageError(f"extra is something that JSON cannot hold: {error}") from None
        path = self.file(step)
        checkpoint.save(path, variables, optimizer, metadata={METADATA: text})
        if self.keep is not None:
            for old in self.steps()[: -self.keep]:
                self._remove(old)
        return path

    def load(
        self, variables: Any, optimizer: Optimizer | None = None, step: int | None = None
    ) -> Saved:
        """Put back what was saved as `step`, by default the newest, as `md.load` does.

        Raises DataError where there is none, and whatever `md.load` raises. Of a damaged file the
        error says which older one is whole; nothing is loaded in its place by itself.
        """
        steps = self.steps()
        if step is None:
            if not steps:
                raise DataError(f"{self.path}: there is no checkpoint to load")
            step = steps[-1]
        elif step not in steps:
            has = ", ".join(map(str, steps)) or "none"
            raise DataError(f"{self.path}: no checkpoint of step {step} is there; it has: {has}")
        path = self.file(step)
        try:
            said = _said(path)
            if said is not None and said.step != step:
                raise DataError(f"{path}: was saved as step {said.step}; give it its name back")
            checkpoint.load(path, variables, optimizer)
        except DataError as error:
            if _is_whole(path):
                raise
            older = [old for old in reversed(steps) if old < step]
            whole = next((old for old in older if _is_whole(self.file(old))), None)
            if whole is None:
                raise DataError(f"{error}. No older checkpoint here is whole") from error
            raise DataError(
                f"{error}. The one of step {whole} is whole: to go on from it, move {path.name} "
                "away"
            ) from error
        return said or Saved(step, {})

    def _require_lock(self) -> None:
        if self._lock is None:
            raise UsageError(f"{self.path} was opened to load only, or closed; nothing is saved")
        try:
            if os.path.samestat(os.fstat(self._lock), (self.path / LOCK).stat()):
                return
        except OSError:
            pass
        raise DataError(f"{self.path}: was removed or replaced while checkpoints were saved to it")

    def _remove(self, step: int) -> None:
        path = self.file(step)
        try:
            said = _said(path)
        except DataError:
            return  # nobody can say whose it is
        if said is None or said.step != step or path.is_symlink():
            return
        try:
            path.unlink()
        except OSError as error:
            raise DataError(f"{path}: cannot be removed: {error.strerror or error}") from error


def _make(path: Path) -> None:
    """Make a folder, and those above it, and bring their names to the disk."""
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: is no folder, so no checkpoints can be in it; name another")
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def _take_lock(path: Path) -> int:
    """Return a descriptor that holds the folder's lock, with this process's number in the file."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode(errors="replace") or "unknown"
        os.close(lock)
        raise DataError(
            f"{path}: another training (process {holder}) saves its checkpoints there; wait for "
            "its end, or name another folder"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _said(path: Path) -> Saved | None:
    """Return what a checkpoint says it was saved as, None where `TrainDir` has not saved it."""
    with TensorFile(path) as file:
        text = file.metadata.get(METADATA)
        if text is None:
            return None

        def error(byte: int, message: str) -> DataError:
            return DataError(f"{path}: in the metadata {METADATA!r}, {message}")

        said = parse_json(text.encode("utf-8", "surrogatepass"), error)
        if not isinstance(said, dict) or set(said) != {"step", "extra"}:
            raise error(0, "expected 'step' and 'extra'")
        return Saved(**said)


def _is_whole(path: Path) -> bool:
    """Whether a file has every byte that was saved, by the checksum saved with them."""
    try:
        with TensorFile(path) as file:
            file.read({})
            return file.checksum is not None
    except DataError:
        return False
