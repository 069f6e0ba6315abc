"""Input pipelines: who reads which part of the data.

A pipeline feeds one or more replicas. Which part of the data is its own is said by an input
function from the InputContext that it gets; `shard` makes parts that are disjoint by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minidist.errors import UsageError
from minidist.input.share import Share

MODES = ("per_worker", "per_replica")


@dataclass(frozen=True, slots=True)
class InputContext:
    """What an input function knows of the pipeline that it makes.

    num_input_pipelines: how many there are; input_pipeline_id: which this is, from 0;
    num_replicas_in_sync: the replicas of all pipelines together.
    Raises UsageError (a ValueError) for numbers that do not go together.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_input_pipelines <= self.num_replicas_in_sync:
            raise UsageError(
                "there must be at least one input pipeline, and a replica for each: not "
                f"{self.num_input_pipelines} for {self.num_replicas_in_sync} replicas"
            )
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise UsageError(
                f"input pipeline {self.input_pipeline_id} is none of the "
                f"{self.num_input_pipelines} that there are; they count from 0"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return each replica's share. Raises UsageError (a ValueError) where it is not whole."""
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise UsageError(
                f"a global batch of {global_batch_size} cannot be divided evenly among "
                f"{self.num_replicas_in_sync} replicas; make it a multiple"
            )
        return share


class _Shard:
    def __init__(self, source: Iterable[Any], num_shards: int, index: int) -> None:
        self._source = source
        self._num_shards, self._index = num_shards, index

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._source), self._index, None, self._num_shards)


def shard(source: Iterable[Any], num_shards: int, index: int) -> Iterable[Any]:
    """Return every `num_shards`-th element of `source`, from number `index` on.

    The shards of indices 0 to num_shards - 1 are disjoint and together the whole. A shard can be
    iterated over again if its source can. Raises UsageError (a ValueError) for an index outside.
    """
    whole = isinstance(num_shards, int) and isinstance(index, int)
    if not whole or not 0 <= index < num_shards:
        raise UsageError(f"shard {index!r} is none of {num_shards!r}; they count from 0")
    return _Shard(source, num_shards, index)


class _Calls:
    """What a function returns, called again and again until it raises StopIteration."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                element = self._fn()
            except StopIteration:
                return
            yield element


def sources(
    input_fn: Callable[[InputContext], Any], replication_mode: str, share: Share
) -> list[Iterable[Any]]:
    """Call an input function once for each pipeline of this process; return what each reads.

    Raises UsageError (a ValueError) for an unknown mode, and where the input function returns
    neither an iterable nor a function.
    """
    if replication_mode not in MODES:
        raise UsageError(
            f"replication_mode must be {' or '.join(map(repr, MODES))}, not {replication_mode!r}"
        )
    pipelines, first, own = share.workers, share.worker, 1
    if replication_mode == "per_replica":
        pipelines, first, own = share.replicas, share.first, share.count
    contexts = [InputContext(pipelines, first + i, share.replicas) for i in range(own)]
    return [_source(input_fn(ctx)) for ctx in contexts]


def _source(made: Any) -> Iterable[Any]:
    if isinstance(made, Iterable):
        return made
    if callable(made):
        return _Calls(made)
    raise UsageError(
        f"an input function must return an iterable of batches, or a function that returns the "
        f"next batch, not {made!r}"
    )
