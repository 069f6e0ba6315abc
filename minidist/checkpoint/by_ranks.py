"""A checkpoint saved by several ranks, in steps after each of which all know how it went.

    begin     they mean the same, and the first of them holds the checkpoint's lock
    write     each writes a shard, the arrays being shared out by their bytes, and each parameter
              server one of what it holds
    look      the first one sees every shard
    index     it writes the index, which then takes the old one's name: that is the moment
    tidy      it removes what was there before

Until that moment the old checkpoint is as it was. What fails before leaves nothing behind, and what
a killed save has left, the next one removes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from minidist.checkpoint import shards
from minidist.checkpoint.about import METADATA
from minidist.checkpoint.opened import ShardedFile
from minidist.checkpoint.together import Together
from minidist.checkpoint.training import State
from minidist.comm.sharing import agree
from minidist.dtypes import HostArray
from minidist.errors import DataError
from minidist.optim import Optimizer
from minidist.state import server_of, taken_out
from minidist.tensor_file import PARTIAL, TensorFile, replacing
from minidist.traffic import Outline
from minidist.variable import Variable


class SaveByRanks:
    """One such save, of some variables and an optimizer of a strategy."""

    def __init__(
        self,
        together: Together,
        strategy: Any,
        optimizer: Optimizer | None,
        base: Path,
        texts: Mapping[str, str],
    ) -> None:
        self._together = together
        self._strategy = strategy
        self._servers = strategy.variable_mgr.servers
        self._in_step = strategy.site.peers.count == together.peers.count
        self._optimizer = optimizer
        self._base = base
        self._texts = texts
        self._save = ""  # the number of this save, which is in its shards' names
        self._mode: int | None = None  # who may read what is written
        self._state: State
        self._index: IO[bytes]  # of the first rank: what takes the index's name
        self._old: list[Path] = []  # of the first rank: what was there before

    def save(self, variables: Sequence[Variable]) -> None:
        together, what = self._together, f"save a checkpoint as {self._base.name}"
        with ExitStack() as commit:
            begun = together.do(what, lambda: self._begin(variables, commit))
            self._save, self._mode = begun[0]["save"], begun[0]["mode"]
            agree(together.peers, what, self._details())
            wrote = together.do(
                f"{what}: write",
                self._writing(),
                undo=self._forget,
                nbytes=self._nbytes(),
            )
            found = [shard for each in wrote for shard in each]
            together.first(f"{what}: look", lambda: self._look_at(found), undo=self._forget)
            counts = [count for each in begun for count in each["iterations"]]
            together.first(f"{what}: index", lambda: self._commit(found, counts, commit))
        together.first(f"{what}: tidy", lambda: shards.remove(self._old))

    # --- begin

    def _begin(self, variables: Sequence[Variable], commit: ExitStack) -> dict[str, Any]:
        self._state = State.of(self._strategy, variables, self._optimizer)
        if self._servers is not None:
            self._servers.ask("settle", {}, self._optimizer)
        begun: dict[str, Any] = {"iterations": self._state.about.iterations}
        if self._together.is_first:
            base = self._base
            if os.path.isdir(base):
                raise DataError(f"{base}: is a folder, so nothing can be saved as it; name a file")
            mode = shards.mode_of(base)
            partial = base.with_name(base.name + PARTIAL)
            self._index = commit.enter_context(replacing(shards.index_of(base), partial, mode))
            self._old = [base] if os.path.exists(base) else []
            self._old += shards.shards_beside(base)
            begun |= {"save": secrets.token_hex(6), "mode": mode}
        return begun

    def _details(self) -> list[str]:
        """Return what must be the same in all workers."""
        about = self._state.about
        details = [f"{key!r} times {factor:.17g}" for key, factor in about.held.items()]
        for key, (part, *_) in self._state.named.items():
            details.append(f"{key!r} {part.variable.dtype}{list(part.variable.shape)}")
        details += [f"metadata {key!r}: {text!r}" for key, text in self._texts.items()]
        details.append(f"optimizer {about.optimizer}")
        if self._in_step:
            details += [f"step {about.step}", f"loss scale {about.loss_scale}"]
        return details

    # --- write

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of each array that the workers write, by its name."""
        sizes = {key: array.nbytes for key, array in self._state.held.items()}
        for key, (part, *_) in self._state.named.items():
            if server_of(part.variable) is None:
                sizes[key] = Outline.of(part.variable).nbytes
        return sizes

    def _nbytes(self) -> int:
        """Return how much is written in all, about."""
        slots = 0 if self._optimizer is None else len(self._optimizer.slots)
        of_servers = [
            Outline.of(part.variable).nbytes * (1 + slots)
            for part, *_ in self._state.named.values()
            if server_of(part.variable) is not None
        ]
        return sum(self._sizes().values()) + sum(of_servers)

    def _shares(self) -> list[list[str]]:
        """Return the names of the arrays that each worker writes.

        What only one has, it writes. The rest is given out, largest first, each to the one that
        has the fewest bytes so far. Workers that are not in step have values of their own, of
        which only the first one's are saved.
        """
        counts = self._strategy.site.counts if self._in_step else (sum(self._strategy.site.counts),)
        owners = [worker for worker, count in enumerate(counts) for _ in range(count)]
        loads = [0] * len(counts)
        shares: list[list[str]] = [[] for _ in range(self._together.peers.count)]
        rest = []
        for key, nbytes in self._sizes().items():
            replica = self._state.named[key][0].replica if key in self._state.named else None
            if replica is None:
                rest.append((-nbytes, key))
            else:
                shares[owners[replica]].append(key)
                loads[owners[replica]] += nbytes
        for negative, key in sorted(rest):
            least = loads.index(min(loads))
            shares[least].append(key)
            loads[least] -= negative
        return shares

    def _writing(self) -> Callable[[], list[dict[str, Any]]]:
        """Take out the values of this rank's share; return what writes them.

        What fails here may leave others waiting for it, for some values are made of all workers'.
        """
        shares = self._shares()
        writers = [worker for worker, share in enumerate(shares) if share]
        me = self._together.peers.me
        try:
            values = taken_out(self._state.named, shares[me])
        except BaseException as failure:
            self._strategy.site.fail(failure)
            raise
        held = self._state.held
        arrays = {key: values[key] if key in values else held[key] for key in shares[me]}
        servers = () if self._servers is None else self._servers.names
        count = len(writers) + len(servers)

        def write() -> list[dict[str, Any]]:
            found = []
            if arrays:
                number = writers.index(me) + 1
                found.append(self._write(number, count, arrays))
            if servers and self._together.is_first:
                about = {
                    "base": str(self._base.absolute()),
                    "save": self._save,
                    "first": len(writers) + 1,
                    "count": count,
                    "mode": self._mode,
                    "names": [part.variable.name for part, *_ in self._state.named.values()],
                }
                found += [
                    shard for shard in self._servers.ask("save", about, self._optimizer) if shard
                ]
            return found

        return write

    def _write(self, number: int, count: int, arrays: Mapping[str, HostArray]) -> dict[str, Any]:
        shard = shards.write_shard(self._base, self._save, number, count, arrays, self._mode)
        return {**shard, "by": self._together.who(self._together.peers.me)}

    # --- index

    def _look_at(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError unless all shards can be seen from here."""
        for shard in found:
            path = self._base.with_name(shard["file"])
            try:
                with TensorFile(path) as file:
                    seen = file.checksum == shard["checksum"]
            except DataError as error:
                raise DataError(
                    f"{error}, although {shard['by']} has written it; {shards.SHARED}"
                ) from error
            if not seen:
                raise DataError(f"{path}: has not the bytes that {shard['by']} has written")

    def _commit(
        self, found: Sequence[Mapping[str, Any]], counts: list[int], commit: ExitStack
    ) -> None:
        about = self._state.about
        of_servers = [shard for shard in found if "slots" in shard]
        if about.optimizer is not None:
            about.slots += [slot for shard in of_servers for slot in shard["slots"]]
            about.iterations = counts if self._strategy.variable_mgr.independent else counts[:1]
            for shard in of_servers:  # which count themselves where workers are not in step
                about.iterations = [max(about.iterations[0], shard["iterations"])]
        texts = {**self._texts, METADATA: about.text()}
        try:
            self._index.write(shards.index_text(found, texts))
            commit.close()
        except BaseException:
            if not self._has_happened(found):
                self._forget()
            raise

    def _has_happened(self, found: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the index is this save's, although something has failed since."""
        try:
            with ShardedFile(shards.index_of(self._base)) as file:
                return {path.name for path in file.files} == {shard["file"] for shard in found}
        except DataError:
            return False

    def _forget(self) -> None:
        """Remove what has been written so far, as far as that can be done."""
        for path in shards.shards_beside(self._base):
            if f"-{self._save}-" in path.name:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
