"""About: what a checkpoint says besides arrays, as JSON under METADATA among its texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minidist import context, tensor_file
from minidist.checkpoint.opened import Opened
from minidist.checkpoint.shards import SHARD
from minidist.errors import DataError
from minidist.optim import LossScale, Optimizer
from minidist.tensor_file import is_natural

FORMAT = 1
METADATA = "minidist"
ITERATIONS = "iterations"  # what the optimizer's count is called among missing keys
SHOWN = 20  # names of a kind that an error lists


@dataclass(slots=True)
class About:
    """The defaults are those of another program's file."""

    copies: int = 1  # of how many replicas there are copies
    step: int | None = None
    seed: int | None = None
    draws: dict[int, int] = field(default_factory=dict)  # by layer; see context.draw
    optimizer: str | None = None
    slots: list[str] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)  # of each model, if of an optimizer
    loss_scale: dict[str, float] | None = None
    held: dict[str, float] = field(default_factory=dict)  # what the policy held, with its factors

    @classmethod
    def of(cls, strategy: Any, optimizer: Optimizer | None, copies: int) -> About:
        """Return what is to be said of a training, but for slots, iterations and what is held."""
        seed, draws = context.random_state()
        about = cls(copies, strategy.step, seed, draws)
        if optimizer is not None:
            about.optimizer = type(optimizer).__name__
            if optimizer.loss_scale is not None:
                about.loss_scale = optimizer.loss_scale.state
        return about

    def text(self) -> str:
        """Return it as JSON, which `read` takes."""
        return json.dumps({"format": FORMAT, **asdict(self)})


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


def read(file: Opened) -> About:
    """Return what a checkpoint says of itself. Raises DataError where that is not as it should."""
    if SHARD in file.metadata:
        raise DataError(
            f"{file.path}: is {file.metadata[SHARD]}; load that, which finds all of its shards"
        )
    text = file.metadata.get(METADATA)
    if text is None:
        return About()

    def error(byte: int, message: str) -> DataError:
        return file.wrong(f"in the metadata {METADATA!r}, {message}")

    said = tensor_file.parse_json(text.encode("utf-8", "surrogatepass"), error)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise error(0, f"expected format {FORMAT}; has a newer minidist written this file?")
    for name, fits in _FITS.items():
        if name not in said or not fits(said[name]):
            raise error(0, f"expected {name!r} with another value")
    about = About(**{name: said[name] for name in _FITS})
    if (about.optimizer is None) != (not about.iterations):
        raise error(0, f"expected {ITERATIONS!r} if there is an optimizer, and only then")
    if absent := [repr(slot) for slot in about.slots if slot not in file.entries]:
        raise error(0, f"expected 'slots' that are arrays of the file, and not {some(absent)}")
    if file.checksum is None:
        raise error(0, f"expected {tensor_file.CHECKSUM!r} beside it; load an undamaged copy")
    about.draws = {int(layer): count for layer, count in about.draws.items()}
    return about


def some(items: Sequence[str]) -> str:
    """Return a list in words, cut where it is long."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
