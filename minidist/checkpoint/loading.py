"""Loading: all of a checkpoint is read and looked at, by all ranks, before anything changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from minidist import context
from minidist.checkpoint import about, shards
from minidist.checkpoint.about import About
from minidist.checkpoint.fitting import Keys, check, differences
from minidist.checkpoint.opened import Opened, is_there, opened
from minidist.checkpoint.together import Together
from minidist.checkpoint.training import check_optimizer, restore_counts, strategy_of
from minidist.dtypes import HostArray
from minidist.errors import DataError
from minidist.optim import Optimizer
from minidist.state import (
    Part,
    by_key,
    held_by_key,
    server_of,
    slot_names,
    slots_of,
    variables_of,
)
from minidist.tensor_file import target
from minidist.variable import Variable
from minidist.variable_mgr.held import Held, Kept


def load(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> Keys:
    """Put back what `save` has saved, under any policy and with any number of replicas and ranks.

    All replicas get the saved value. Of a file saved under `independent`, another policy takes
    replica 0's, and `independent` gives each replica its own where there is one, else replica 0's.
    Without an optimizer the file's slots are left alone, and so is what another policy held: what
    this one holds starts anew then. The strategy goes on from the saved step, and random numbers
    from the saved seed (a safetensors file of another program has neither).

    path: of a file, or of an index with shards, whose name may be given with or without its end.
    Of several workers all call it together.

    All is read and checked before anything changes, also by the checksum that `save` has put into
    the file. Raises DataError for a file that is missing or damaged, whose arrays have other shapes
    or dtypes than the variables, or that has other keys; with strict=False such keys are returned,
    and what is missing stays as it is. Raises UsageError and ContextError as `save` does. If it
    raises in one worker it does in all, and nothing has changed.
    """
    everything = variables_of(variables)
    strategy = strategy_of(everything, "load")
    together = Together.of(strategy.site)
    loading = Loading(together, strategy, everything, optimizer, target(shards.base(path)))
    return loading.load(strict)


class Loading:
    """One load, of some variables and an optimizer of a strategy."""

    def __init__(
        self,
        together: Together,
        strategy: Any,
        variables: tuple[Variable, ...],
        optimizer: Optimizer | None,
        base: Path,
    ) -> None:
        self._together = together
        self._strategy = strategy
        self._servers = strategy.variable_mgr.servers
        self._variables = variables
        self._optimizer = optimizer
        self._base = base
        self._saved = About()
        self._keys = Keys((), ())
        self._named: dict[str, list[Part]] = {}
        self._held: dict[str, tuple[Variable, Held]] = {}
        self._arrays: dict[str, HostArray] = {}
        self._loaded: set[str] = set()  # names of variables that get a value
        self._file: Opened

    def load(self, strict: bool) -> Keys:
        together, what = self._together, f"load the checkpoint {self._base.name}"
        with ExitStack() as files:
            seen = together.do(what, lambda: self._open(files))
            self._check_same(seen)
            together.do(
                f"{what}: read",
                lambda: self._read(strict),
                undo=lambda: self._ask("forget"),
                nbytes=sum(entry.end - entry.begin for entry in self._file.entries.values()),
            )
        if self._servers is not None:
            together.first(f"{what}: put back", lambda: self._ask("take"))
            together.do(f"{what}: pull", self._servers.pull)  # before it, nobody pushes
        self._put_back()
        return self._keys

    # --- before anything changes

    def _open(self, files: ExitStack) -> str | None:
        """Open the checkpoint; return what tells it from others, None where there is none."""
        check_optimizer(self._optimizer)
        if not self._together.alone and not is_there(self._base):
            return None
        self._file = opened(self._base, everything=self._together.is_first)
        files.push(self._file)
        return self._file.checksum or "of another program"

    def _check_same(self, seen: Sequence[str | None]) -> None:
        """Raise DataError unless all ranks have opened the same checkpoint."""
        if seen == [None] * len(seen):
            raise DataError(f"{self._base}: there is no such file, nor an index of that name")
        for peer, each in enumerate(seen):
            if each != seen[0]:
                pair = [self._together.who(0), self._together.who(peer)]
                if None in (each, seen[0]):
                    sees, other = pair if each is None else reversed(pair)
                    what = f"{sees} sees a checkpoint there, and {other} sees none"
                else:
                    what = f"{pair[0]} and {pair[1]} see different checkpoints there"
                raise DataError(f"{self._base}: {what}; {shards.SHARED}")

    def _read(self, strict: bool) -> None:
        """Read what is wanted, after a look at whether it fits."""
        file, optimizer = self._file, self._optimizer
        saved = self._saved = about.read(file)
        slots = slots_of(self._variables, optimizer, file.entries)
        everything = self._variables + slots
        self._named = by_key(everything, saved.copies)
        self._held = held_by_key(everything)
        wanted = {
            name: variable
            for name, (variable, _) in slot_names(self._variables, optimizer, file.entries).items()
        }
        wanted |= {key: parts[0].variable for key, parts in self._named.items()}
        held = {key: variable for key, (variable, _) in self._held.items() if key in saved.held}
        self._keys = differences(file, saved, wanted, optimizer)
        check(file, saved, {**wanted, **held}, optimizer, self._keys if strict else Keys((), ()))
        here = {
            key: parts[0].variable
            for key, parts in self._named.items()
            if server_of(parts[0].variable) is None
            and any(part.copy_here is not None for part in parts)
        }
        dtypes = {
            key: variable.dtype for key, variable in {**here, **held}.items() if key in file.entries
        }
        self._arrays = file.read(dtypes)
        self._loaded = {variable.name for key, variable in wanted.items() if key in file.entries}
        if self._together.is_first:
            self._ask("read")

    def _ask(self, verb: str) -> None:
        """Let each parameter server do its part, of what it holds."""
        if self._servers is not None and self._together.is_first:
            ask = {
                "base": str(self._base.absolute()),
                "checksum": self._file.checksum,
                "names": [variable.name for variable in self._variables],
                "optimizer": self._optimizer is not None,
            }
            self._servers.ask(verb, ask, self._optimizer)

    # --- afterwards

    def _put_back(self) -> None:
        saved, optimizer = self._saved, self._optimizer
        for key, parts in self._named.items():
            if key in self._arrays:
                for part in parts:
                    part.put_back(self._arrays[key])
        for key, (variable, kind) in self._held.items():
            if variable.name in self._loaded:
                there = key in saved.held
                kept = Kept(self._arrays.get(key), saved.held[key]) if there else None
                kind.put_back(variable, kept)
        if optimizer is not None and saved.iterations:
            restore_counts(self._strategy, optimizer, saved.iterations)
        if optimizer is not None and optimizer.loss_scale is not None and saved.loss_scale:
            optimizer.loss_scale.restore(saved.loss_scale)
        if saved.step is not None and saved.seed is not None:
            self._strategy.step = saved.step
            context.set_random_state(saved.seed, saved.draws)
