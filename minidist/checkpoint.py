"""Checkpoints: a training's state in one file, saved at once and loaded after a look at all of it.

The arrays are those of minidist.state, the file is a safetensors file (minidist.tensor_file). In
its metadata stands as JSON what is no array: the optimizer's iterations, the strategy's step, and
where the random numbers are.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minidist import context, observe, tensor_file
from minidist.errors import ContextError, DataError, UsageError
from minidist.optim import LossScale, Optimizer
from minidist.state import Part, by_key, copies_of, held_by_key, slots_of, taken_out, variables_of
from minidist.tensor_file import TensorFile, is_natural
from minidist.variable import Variable
from minidist.variable_mgr.held import Kept

FORMAT = 1
METADATA = "minidist"  # what our JSON is called in the file's metadata
ITERATIONS = "iterations"  # what the optimizer's count is called among missing keys
SHOWN = 20  # keys of a kind that an error lists


class Keys(NamedTuple):
    """Keys that only one side has: missing in the file, or unexpected there. In order."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def save(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: Optimizer | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save a training as one file: variables, an optimizer's slots and iterations, step and seed.

    variables: a Variable, a model or whatever else has `variables`, or a sequence of such.
    Call it outside run, or inside merge_call. One value of each variable is saved, and under
    `independent` each replica's; beside them what the policy holds from step to step. An
    optimizer's hyperparameters are not saved.
    metadata: further texts that shall stand in the file's metadata.

    Whenever the process or the machine stops, the file at `path` is the old one or the new one.
    Raises UsageError (a ValueError) for two variables of one name and for a dtype that the format
    lacks, ContextError in a replica or another strategy, DataError where it cannot be written.
    """
    everything = variables_of(variables)
    strategy = _strategy(everything, "save")
    _check_optimizer(optimizer)
    if optimizer is not None:
        optimizer.require_whole_step("saved")
    slots = slots_of(everything, optimizer)
    seed, draws = context.random_state()
    about = _About(copies_of(everything), strategy.step, seed, draws)
    if optimizer is not None:
        about.optimizer = type(optimizer).__name__
        about.slots = [slot.name for slot in slots]
        about.iterations = [optimizer.iterations_at(place) for place in range(_models(strategy))]
        if optimizer.loss_scale is not None:
            about.loss_scale = optimizer.loss_scale.state
    with observe.span("save", "a checkpoint", path=str(path)):
        arrays, about.held = taken_out(everything + slots)
        text = json.dumps({"format": FORMAT, **asdict(about)})
        tensor_file.write(Path(path), arrays, {**(metadata or {}), METADATA: text})


def load(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> Keys:
    """Put back what `save` has saved, under any policy and with any number of replicas.

    All replicas get the saved value. Of a file saved under `independent`, another policy takes
    replica 0's, and `independent` gives each replica its own where there is one, else replica 0's.
    Without an optimizer the file's slots are left alone, and so is what another policy held: what
    this one holds starts anew then. The strategy goes on from the saved step, and random numbers
    from the saved seed (a safetensors file of another program has neither).

    All is read and checked before anything changes, also by the checksum that `save` has put into
    the file. Raises DataError for a file that is missing or damaged, whose arrays have other shapes
    or dtypes than the variables, or that has other keys; with strict=False such keys are returned,
    and what is missing stays as it is. Raises UsageError and ContextError as `save` does.
    """
    everything = variables_of(variables)
    strategy = _strategy(everything, "load")
    _check_optimizer(optimizer)
    with TensorFile(Path(path)) as file:
        saved = _about(file)
        everything += slots_of(everything, optimizer, file.entries)
        wanted = by_key(everything, saved.copies)
        held = held_by_key(everything)
        variable_of = {key: alike[0].variable for key, alike in wanted.items()}
        variable_of |= {key: variable for key, (variable, _) in held.items() if key in saved.held}
        keys = _differences(file, saved, wanted, optimizer)
        _check(file, saved, variable_of, optimizer, keys if strict else Keys((), ()))
        arrays = file.read(
            {key: variable.dtype for key, variable in variable_of.items() if key in file.entries}
        )
    for key, alike in wanted.items():
        if key in arrays:
            for part in alike:
                part.put_back(arrays[key])
    for key, (variable, kind) in held.items():
        if variable.name in arrays:
            there = key in saved.held
            kind.put_back(variable, Kept(arrays.get(key), saved.held[key]) if there else None)
    if optimizer is not None and saved.iterations:
        counts = saved.iterations[: _models(strategy)]
        counts += counts[:1] * (strategy.num_replicas - len(counts))
        optimizer.restore_iterations(counts)
    if optimizer is not None and optimizer.loss_scale is not None and saved.loss_scale:
        optimizer.loss_scale.restore(saved.loss_scale)
    if saved.step is not None and saved.seed is not None:
        strategy.step = saved.step
        context.set_random_state(saved.seed, saved.draws)
    return keys


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"a checkpoint keeps the state of one optimizer, or of none, and not of {optimizer!r}; "
            "use a file for each, with the variables that each trains"
        )


def _strategy(variables: Collection[Variable], verb: str) -> Any:
    """Return the one strategy of the variables, whose cross-replica context this must be."""
    strategies = list(dict.fromkeys(variable.strategy for variable in variables))
    others = [strategy for strategy in strategies if not context.is_default(strategy)]
    if len(others) > 1:
        raise ContextError(
            f"Mixing different Strategy objects: {verb} got variables of "
            f"{' and '.join(map(repr, others))}; use a file for each"
        )
    for strategy in strategies:
        strategy._require(verb)
    return (others or strategies)[0]


def _models(strategy: Any) -> int:
    """Return how many models are trained, each of which counts its own iterations."""
    return strategy.num_replicas if strategy.variable_mgr.independent else 1


# --- what a file says besides arrays ------------------------------------------------------------


@dataclass(slots=True)
class _About:
    """What stands in the metadata; the defaults are those of another program's file."""

    copies: int = 1  # of how many replicas there are copies
    step: int | None = None
    seed: int | None = None
    draws: dict[int, int] = field(default_factory=dict)  # by layer; see context.draw
    optimizer: str | None = None
    slots: list[str] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)  # of each model, if of an optimizer
    loss_scale: dict[str, float] | None = None
    held: dict[str, float] = field(default_factory=dict)  # what the policy held, with its factors


_FITS: dict[str, Callable[[Any], bool]] = {
    "copies": lambda said: is_natural(said) and said > 0,
    "step": is_natural,
    "seed": lambda said: is_natural(said, bits=64),
    "draws": lambda said: (
        isinstance(said, dict)
        and all(re.fullmatch(r"[0-9]{1,9}", layer) for layer in said)
        and all(map(is_natural, said.values()))
    ),
    "optimizer": lambda said: said is None or isinstance(said, str),
    "slots": lambda said: isinstance(said, list) and all(isinstance(slot, str) for slot in said),
    "iterations": lambda said: isinstance(said, list) and all(map(is_natural, said)),
    "loss_scale": lambda said: said is None or LossScale.fits(said),
    "held": lambda said: isinstance(said, dict) and all(map(_is_number, said.values())),
}


def _is_number(said: Any) -> bool:
    return isinstance(said, int | float) and math.isfinite(said)


def _about(file: TensorFile) -> _About:
    text = file.metadata.get(METADATA)
    if text is None:
        return _About()

    def error(byte: int, message: str) -> DataError:
        return file.error(tensor_file.LENGTH, f"in the metadata {METADATA!r}, {message}")

    said = tensor_file.parse_json(text.encode("utf-8", "surrogatepass"), error)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise error(0, f"expected format {FORMAT}; has a newer minidist written this file?")
    for name, fits in _FITS.items():
        if name not in said or not fits(said[name]):
            raise error(0, f"expected {name!r} with another value")
    about = _About(**{name: said[name] for name in _FITS})
    if (about.optimizer is None) != (not about.iterations):
        raise error(0, f"expected {ITERATIONS!r} if there is an optimizer, and only then")
    if absent := [repr(slot) for slot in about.slots if slot not in file.entries]:
        raise error(0, f"expected 'slots' that are arrays of the file, and not {_some(absent)}")
    if file.checksum is None:
        raise error(0, f"expected {tensor_file.CHECKSUM!r} beside it; load an undamaged copy")
    about.draws = {int(layer): count for layer, count in about.draws.items()}
    return about


# --- what a file has, and what is wanted --------------------------------------------------------

Wanted = Mapping[str, Sequence[Part]]
REPLICA = re.compile(r"/replica_([1-9][0-9]{0,8})$")


def _differences(
    file: TensorFile, saved: _About, wanted: Wanted, optimizer: Optimizer | None
) -> Keys:
    """Return the keys that only one side has, apart from those that are left alone on purpose."""
    missing = [key for key in wanted if key not in file.entries]
    if optimizer is not None and not saved.iterations:
        missing.append(ITERATIONS)
    left_alone = {*saved.held, *(saved.slots if optimizer is None else ())}

    def known(key: str) -> bool:
        replica = REPLICA.search(key)
        if key not in wanted and replica and int(replica[1]) < saved.copies:
            key = key[: replica.start()]
        return key in wanted or key in left_alone

    return Keys(tuple(missing), tuple(key for key in file.entries if not known(key)))


def _check(
    file: TensorFile,
    saved: _About,
    variable_of: Mapping[str, Variable],
    optimizer: Optimizer | None,
    keys: Keys,
) -> None:
    """Raise one DataError about all arrays that do not fit, and about these keys."""
    wrong = []
    for key, variable in variable_of.items():
        entry = file.entries.get(key)
        if entry and (entry.dtype, entry.shape) != (variable.dtype.name, variable.shape):
            wrong.append(
                f"{key!r} is {entry.dtype}{list(entry.shape)} there and "
                f"{variable.dtype}{list(variable.shape)} here"
            )
    complaints = [
        f"{what}: {_some(items)}"
        for what, items in (
            ("missing in the file", [repr(key) for key in keys.missing]),
            ("unexpected in the file", [repr(key) for key in keys.unexpected]),
            ("of another shape or dtype", wrong),
        )
        if items
    ]
    if not complaints:
        return
    message = f"{file.path}: does not fit what is to be loaded. " + "; ".join(complaints)
    if optimizer is not None and saved.optimizer not in (None, type(optimizer).__name__):
        message += f". It was saved with {saved.optimizer}, not {type(optimizer).__name__}"
    if not wrong:
        message += ". With strict=False, what both sides have is loaded"
    raise DataError(message)


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
