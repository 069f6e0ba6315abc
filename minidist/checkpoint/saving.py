"""Saving: what there is of a training into one file, or as several ranks' shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from minidist import observe
from minidist.checkpoint import shards
from minidist.checkpoint.about import METADATA
from minidist.checkpoint.by_ranks import SaveByRanks
from minidist.checkpoint.together import Together
from minidist.checkpoint.training import State, strategy_of
from minidist.optim import Optimizer
from minidist.state import taken_out, variables_of
from minidist.tensor_file import target


def save(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: Optimizer | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save a training: variables, an optimizer's slots and iterations, step and seed.

    variables: a Variable, a model or whatever else has `variables`, or a sequence of such.
    Call it outside run, or inside merge_call. One value of each variable is saved, and under
    `independent` each replica's; beside them what the policy holds from step to step. An
    optimizer's hyperparameters are not saved.
    metadata: further texts that shall stand in the file's metadata.

    Of several workers all call it together, with a path in a folder that all their machines share;
    each writes its part, and parameter servers what they hold. There is then no file of that
    name, but an index and shards beside it (see minidist.checkpoint.shards); `load` takes it all
    the same.

    Whenever a process or a machine stops, what `load` finds at `path` is the old checkpoint or the
    new one. Raises UsageError (a ValueError) for two variables of one name and for a dtype that the
    format lacks, ContextError in a replica or another strategy, DataError where it cannot be
    written: in all workers, wherever it went wrong.
    """
    everything = variables_of(variables)
    strategy = strategy_of(everything, "save")
    together = Together.of(strategy.site)
    base = target(shards.base(path))
    texts = dict(metadata or {})
    with observe.span("save", "a checkpoint", path=str(path)):
        if together.alone and strategy.variable_mgr.servers is None:
            state = State.of(strategy, everything, optimizer)
            arrays = {**taken_out(state.named), **state.held}
            shards.write_file(base, arrays, {**texts, METADATA: state.about.text()})
        else:
            SaveByRanks(together, strategy, optimizer, base, texts).save(everything)
