"""A training's folder: a checkpoint for each saved step, of which the newest few are kept.

    step-100.safetensors                    a checkpoint of one process: whole, or not there at all
    step-200.safetensors.index.json         one of several ranks, and
    step-200-…-00001-of-00002.safetensors   its shards (minidist.checkpoint.shards)
    lock                                    whoever writes here holds it, and it says who that is

The listing of the folder is the index, so no crash can bring the two apart. The lock ends with the
process that holds it; a file of that name that nobody holds does no harm.

Several workers open a folder together, on a file system that all their machines share. The first of
them, the chief, holds the lock, lists and removes; what it finds, all go by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from operator import index
from pathlib import Path
from typing import Any

from minidist import checkpoint
from minidist.checkpoint import shards
from minidist.checkpoint.together import Together
from minidist.checkpoint.training import strategy_of
from minidist.cluster import Cluster, alone, connected
from minidist.errors import DataError, UsageError
from minidist.optim import Optimizer
from minidist.state import variables_of
from minidist.tensor_file import is_natural
from minidist.train_dir.folder import METADATA, Folder, Saved, text

__all__ = ["Saved", "TrainDir"]


class TrainDir:
    """A folder of checkpoints by step; a context manager that closes it.

    Opening it makes the folder where there is none, takes its lock until `close`, and removes what
    a killed save has left. With write=False nothing of that happens, and `save` is refused: so one
    process can evaluate what another trains.

    keep: after a save only so many of the newest checkpoints stay; None keeps all. Removed is only
    what says of itself that it was saved here, and only when the newer one is on the disk.
    cluster: whose workers open it together; by default those of the job, where `md.connect` has
    been called, and else this process alone. All of them open it, and call `steps`, `newest`,
    `save` and `load` together; what raises in one of them does in all.

    Raises UsageError (a ValueError) for a `keep` below 1, DataError for a path that is no folder or
    may not be written to, where somebody else writes there, and where the workers' machines do not
    share it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = 5,
        write: bool = True,
        cluster: Cluster | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep must be at least 1, or None for all, but it is {keep}")
        self.path = Path(path)
        self.keep = keep
        self._write = write
        self._folder = Folder(self.path)
        self._together = Together((cluster or connected() or alone()).peers())
        if not write:
            self.steps()  # so that a folder that is not there is an error now
            return
        try:
            held = self._first("open", self._folder.open)
            self._together.do(self._what("look into"), lambda: self._look_at_lock(held))
        except BaseException:
            self.close()
            raise

    def _look_at_lock(self, held: str) -> None:
        """Raise DataError unless this rank sees the file that the chief has just written."""
        if self._folder.says() != held:
            raise DataError(
                f"{self.path}: here it is not the folder that {self._together.who(0)} has opened; "
                f"{shards.SHARED}"
            )

    def _what(self, verb: str) -> str:
        return f"{verb} the training folder {self.path.name}"

    def _first(self, verb: str, work: Callable[[], Any]) -> Any:
        """Let the chief do something; all get what it returns, or raise what it raises."""
        return self._together.first(self._what(verb), work)

    def close(self) -> None:
        """Let others write here. Closing twice is fine."""
        self._write = False
        self._folder.close()

    def __enter__(self) -> TrainDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- what there is

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have a checkpoint, in rising order."""
        return tuple(self._first("list", self._folder.steps))

    def newest(self) -> int | None:
        """Return the last step that has a checkpoint, None where there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def file(self, step: int) -> Path:
        """Return what the checkpoint of a step is called, or would be, as `md.load` takes it."""
        return self._folder.file(step)

    # --- saving and loading

    def save(
        self,
        step: int,
        variables: Any,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a training as `md.save` does, as that of a step; return what it is called.

        extra: what else shall be known on loading, as JSON can hold it. A checkpoint of the same
        step is replaced. When this returns, all files are on the disk and old ones are gone.
        Raises UsageError (a ValueError) for a step that is no whole number of at least 0, DataError
        where there are newer steps than this one already (another training's, or those before the
        one that was gone on from), and whatever `md.save` raises; the older ones stay then.
        """
        step = index(step)
        self._check_strategy(variables, "save")
        texts: dict[str, str] = {}

        def begin() -> None:
            if not is_natural(step, bits=59):
                raise UsageError(f"a step is a whole number of at least 0, not {step}")
            if not self._write:
                raise UsageError(
                    f"{self.path} was opened to load only, or closed; nothing is saved"
                )
            if self._together.is_first:
                self._folder.require_place(step)
            texts[METADATA] = text(step, extra)

        self._together.do(self._what("save to"), begin)
        path = self.file(step)
        checkpoint.save(path, variables, optimizer, metadata=texts)
        if (most := self.keep) is not None:
            self._first("tidy", lambda: self._folder.keep(most))
        return path

    def load(
        self, variables: Any, optimizer: Optimizer | None = None, step: int | None = None
    ) -> Saved:
        """Put back what was saved as `step`, by default the newest, as `md.load` does.

        Raises DataError where there is none, and whatever `md.load` raises. Of a damaged file the
        error says which older one is whole; nothing is loaded in its place by itself.
        """
        self._check_strategy(variables, "load")
        which = "the newest" if step is None else f"step {index(step)}"
        step = self._first(f"load {which} of", lambda: self._folder.choose(step))
        try:
            said = Saved(*self._first("read in", lambda: self._folder.said(step)))
            checkpoint.load(self.file(step), variables, optimizer)
        except DataError as error:
            advice = self._first("look for a whole one in", lambda: self._folder.advice(step))
            if advice is None:
                raise
            raise DataError(f"{error}. {advice}") from error
        return said

    def _check_strategy(self, variables: Any, verb: str) -> None:
        """Be as patient as the variables' strategy, which must be of those who opened the folder.

        Raises UsageError where it is not.
        """
        site = strategy_of(variables_of(variables), verb).site
        if site.files.count != self._together.peers.count:
            raise UsageError(
                f"{self.path} was opened by {', '.join(self._together.peers.names)} together, but "
                f"the variables' strategy is that of {', '.join(site.files.names)}; give both the "
                "same cluster (minidist.cluster.alone() is that of one process)"
            )
        self._together.patience = Together.of(site).patience
