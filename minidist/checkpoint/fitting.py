"""Fitting: what a checkpoint has, and what is wanted of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from minidist.checkpoint.about import ITERATIONS, About, some
from minidist.checkpoint.opened import Opened
from minidist.errors import DataError
from minidist.optim import Optimizer
from minidist.variable import Variable

REPLICA = re.compile(r"/replica_([1-9][0-9]{0,8})$")


class Keys(NamedTuple):
    """Keys that only one side has: missing in the file, or unexpected there. In order."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def differences(
    file: Opened, saved: About, wanted: Mapping[str, Variable], optimizer: Optimizer | None
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


def check(
    file: Opened,
    saved: About,
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
        f"{what}: {some(items)}"
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
